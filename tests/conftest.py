"""Settings of every test: two CPU devices, no silent broadcasting, compiled programs kept between runs."""

import os
from pathlib import Path

# Child processes (scripts, workers) inherit these; jax reads them at import.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=2'.strip()
_cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'tether' / 'jax'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')

import hypothesis
import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')

# The first example compiles; CI must not depend on luck.
hypothesis.settings.register_profile('tether', deadline=None, derandomize='CI' in os.environ)
hypothesis.settings.load_profile('tether')
