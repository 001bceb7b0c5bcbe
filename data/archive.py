"""The bytes of an npz file: a zip archive of arrays. Whatever is wrong with it becomes a `DataError`; nothing is unpickled or extracted."""

import contextlib
import math
import os
import re
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**30
# name -> (number of axes, dtype kinds). Observations may have more axes; of integers they may only be uint8 (images).
COLUMNS = {
    'observations': (2, 'fu'),
    'next_observations': (2, 'fu'),
    'actions': (2, 'f'),
    'terminals': (1, 'biuf'),
    'valids': (1, 'biuf'),
    'rewards': (1, 'biuf'),
    'masks': (1, 'biuf'),
    'qpos': (2, 'f'),
    'qvel': (2, 'f'),
    'button_states': (2, 'iu'),
}
# How files that are no npz begin.
SIGNATURES = {
    b'<': 'is a web page (HTML), not an npz file: a download page or error page was saved in its place',
    b'\x89HDF': 'is an HDF5 file, not an npz file',
    b'\x93NUMPY': 'is a single .npy array, not an npz file',
    b'version https://git-lfs': 'is a Git LFS pointer, not the npz file itself',
}
# What zipfile, zlib and numpy raise on damaged bytes.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    TypeError,
    SyntaxError,
    OverflowError,
    MemoryError,
    tokenize.TokenError,
)
AGAIN = 'download or generate the file again'


class DataError(ValueError):
    """A file of recorded data cannot be used. One line that names the file and says what to do."""


def fault(path: Any, problem: str) -> DataError:
    """The error 'PATH: problem', on one line whatever the path or the problem contain."""
    return DataError(' '.join(f'{path}: {problem}'.split()))


def open_archive(path: Path, source: Any = None) -> zipfile.ZipFile:
    """Opens an npz file after checking what it claims to hold; the caller closes it.

    What is larger than MAX_BYTES or the memory of this machine after decompression is refused.

    Args:
      path: the file.
      source: what errors name instead of the path.

    Raises:
      DataError: not an npz file, or one that no honest writer makes.
    """
    source = source or path
    if path.is_dir():
        raise fault(source, 'is a folder; name one npz file in it')
    try:
        with open(path, 'rb') as file:
            start = file.read(64)
    except FileNotFoundError:
        raise fault(source, 'no such file; check the path') from None
    except OSError as error:
        raise fault(source, f'cannot be read ({error.strerror}); check the path and its permissions') from error
    if not start:
        raise fault(source, f'is empty (0 bytes); {AGAIN}')
    for signature, problem in SIGNATURES.items():
        if start.lstrip(b'\xef\xbb\xbf \t\r\n').startswith(signature):
            raise fault(source, f'{problem}; {AGAIN}')
    try:
        archive = zipfile.ZipFile(path)
    except (*DAMAGE, OSError) as error:
        problem = 'is cut short or damaged' if start.startswith(b'PK') else 'is not an npz file'
        raise fault(source, f'{problem} ({error}); {AGAIN}') from error
    members = archive.infolist()
    names = [member.filename for member in members]
    unsafe = [name for name in names if name.startswith(('/', '\\')) or '..' in re.split(r'[/\\]', name) or re.match(r'[A-Za-z]:', name)]
    limit = min(MAX_BYTES, os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
    declared = sum(member.file_size for member in members)
    problem = None
    if unsafe:
        problem = f'holds the unsafe member name {unsafe[0]!r}; do not trust this file'
    elif len(set(names)) < len(names):
        problem = f'holds two members of one name; {AGAIN}'
    elif declared > limit:
        problem = f'would take {declared / 2**30:.1f} GiB decompressed, over the limit of {limit / 2**30:.1f} GiB; do not trust this file'
    if problem:
        archive.close()
        raise fault(source, problem)
    return archive


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """All columns that we know and the file has. Other members are left alone."""
    columns = {}
    with contextlib.closing(open_archive(path)) as archive:
        for name in COLUMNS:
            try:
                member = archive.getinfo(f'{name}.npy')
            except KeyError:
                continue
            try:
                values = _read_array(path, name, archive, member)
            except DataError:
                raise
            except (*DAMAGE, OSError) as error:
                raise fault(path, f'{name} cannot be read ({error}); {AGAIN}') from error
            kind = values.dtype.kind
            if name in ('rewards', 'masks') or (kind == 'f' and name in ('observations', 'next_observations', 'actions')):
                values = float32(values)
            columns[name] = np.ascontiguousarray(values, values.dtype.newbyteorder('='))
    return columns


def _read_array(path: Path, name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise fault(path, f'{name} is compressed in a way that numpy does not write; save the file with numpy.savez_compressed')
    # The header is judged before numpy allocates what it asks for.
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise fault(path, f'{name} has npy version {version}, which numbers never need; {AGAIN}')
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        start = file.tell()
    if dtype.hasobject:
        raise fault(path, f'{name} is an array of Python objects, which are never unpickled; save it as plain numbers')
    if dtype.kind not in 'biuf':
        raise fault(path, f'{name} must be {expected(name)}, not {dtype}; {AGAIN}')
    if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != member.file_size:
        raise fault(path, f'{name} claims shape {shape} of {dtype} but holds {member.file_size - start} bytes; {AGAIN}')
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def float32(values: Any) -> np.ndarray:
    """A float32 copy."""
    with np.errstate(over='ignore'):  # what overflows becomes Inf and is reported with its place
        return np.asarray(values).astype(np.float32)


def expected(name: str) -> str:
    """What a column must be, in words."""
    axes, kinds = COLUMNS[name]
    numbers = {'fu': 'floats or uint8', 'f': 'floats', 'iu': 'integers'}.get(kinds, 'numbers')
    return f'{numbers} with {axes}{" or more" if "observations" in name else ""} {"axis" if axes == 1 else "axes"}'
