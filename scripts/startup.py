"""What every script does around its `main`: user errors become one line and exit code 2."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags, logging

# What a user can put right. Other exceptions are bugs and keep their traceback.
USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def run(main: Callable[[list[str]], Any]) -> NoReturn:
    """Parses the flags, calls main(argv) and exits with what it returns (None is 0).

    Wrong flags and USER_ERRORS print 'error: ...' as one line and exit with 2; an interrupt exits with 130. `--verbosity=1` prints the
    traceback as well.
    """
    try:
        app.run(main, flags_parser=flags.FLAGS)
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
