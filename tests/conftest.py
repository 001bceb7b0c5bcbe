"""Settings of every test: two CPU devices, no silent broadcasting, compiled programs kept between runs."""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path

# Child processes (scripts, workers) inherit these; jax reads them at import.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=2'.strip()
_cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'tether' / 'jax'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')

import hypothesis
import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')

# The first example compiles; CI must not depend on luck.
hypothesis.settings.register_profile('tether', deadline=None, derandomize='CI' in os.environ)
hypothesis.settings.load_profile('tether')


@pytest.fixture(scope='session')
def helper():
    """helper('folder/file.py'): a module beside the tests, which are no package."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def powerless(tmp_path):
    """powerless(): a context in which rights to files count. Root may write anywhere, so it acts as nobody, who may reach tmp_path."""

    @contextlib.contextmanager
    def act():
        if os.geteuid() != 0:
            yield
            return
        for folder in (tmp_path, *tmp_path.parents):
            if Path(tempfile.gettempdir()) in folder.parents:
                folder.chmod(folder.stat().st_mode | 0o055)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return act
