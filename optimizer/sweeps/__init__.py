"""Many problems: a grid of points, each planned and kept as it ends, shared by processes and machines; what they say together."""
