"""Judges jobs that exist: what they break, whether they fit, what would be faster, and the way there in their own words."""
