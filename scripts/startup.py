"""What every script does around its `main`: user errors become one line and exit code 2, and JAX is set up before it is imported."""

import difflib
import importlib.util
import logging as std_logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from absl import app, flags, logging

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('agents', 'data', 'envs', 'losses', 'networks', 'optimizers', 'training')

# What a user can put right. Other exceptions are bugs and keep their traceback.
USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def set_up_jax() -> None:
    """Call before JAX is imported: one CPU device per core, so that seeds spread over them, and a persistent compilation cache.

    Variables that the user has set stay as they are.
    """
    options = os.environ.get('XLA_FLAGS', '')
    if 'xla_force_host_platform_device_count' not in options:
        os.environ['XLA_FLAGS'] = f'{options} --xla_force_host_platform_device_count={os.cpu_count() or 1}'.strip()
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'tether' / 'jax'
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(cache))
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
    for chatty in ('jax._src.xla_bridge', 'matplotlib', 'OpenGL'):  # a line for each device and library that is not there, and for fonts
        std_logging.getLogger(chatty).setLevel(std_logging.WARNING)


def warn_of_shadows() -> None:
    """One line for each folder of the working directory that has the name of one of our packages: scripts use ours, notebooks may not."""
    here = Path.cwd()
    for name in PACKAGES:
        if here != ROOT and (here / name).is_dir() and (here / name).resolve() != ROOT / name:
            print(f'note: {here / name} has the name of a Tether package; this script uses {ROOT / name}', file=sys.stderr)


def load_named(kind: str, argv: list[str], ending: str) -> ModuleType:
    """The module that the one argument of a script names: ROOT/kind/NAME.py or ROOT/kind/NAME/experiment.py. Raises ValueError."""
    folders = ending != '.py'
    paths = (ROOT / kind).glob(f'*/{ending}' if folders else f'*{ending}')
    files = {path.parent.name if folders else path.stem: path for path in paths}
    known = sorted(files)
    if len(argv) != 2:
        raise ValueError(f'name one of {kind}: {", ".join(known)}')
    if argv[1] not in known:
        near = difflib.get_close_matches(argv[1], known, n=1)
        raise ValueError(f'{kind} has no {argv[1]!r}: ' + (f'did you mean {near[0]}?' if near else f'it has {", ".join(known)}'))
    spec = importlib.util.spec_from_file_location(f'{kind}_{argv[1]}', files[argv[1]])
    if spec is None or spec.loader is None:
        raise ValueError(f'cannot read {files[argv[1]]}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(main: Callable[[list[str]], Any]) -> NoReturn:
    """Parses the flags, calls main(argv) and exits with what it returns (None is 0).

    Wrong flags and USER_ERRORS print 'error: ...' as one line and exit with 2; an interrupt exits with 130. `--verbosity=1` prints the
    traceback as well.
    """
    warn_of_shadows()
    try:
        app.run(main, flags_parser=flags.FLAGS)
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(flags.FLAGS), n=3)
        fail(f'unknown flag --{error.flagname}' + (f': did you mean --{" or --".join(near)}?' if near else '; --helpfull lists the flags'))
    except flags.Error as error:
        fail(f'{error}; --help lists the flags')
    except USER_ERRORS as error:
        logging.debug('traceback of the error', exc_info=True)
        fail(error)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def fail(error: object) -> NoReturn:
    """Prints an error as one line and exits with 2."""
    print(line(error), file=sys.stderr)
    sys.exit(2)


def line(error: object) -> str:
    """'error: ...' with every run of white space made one space."""
    return 'error: ' + ' '.join(str(error).split())
