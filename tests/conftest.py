"""Settings of all tests: property tests are judged by what they find, not by how loaded the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("paraplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paraplan")
