"""Settings of all tests: property tests are judged by what they find, not by how loaded the machine is, and SIGINT is taken even
where a shell starts them in the background, which ignores it."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("paraplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paraplan")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
