"""What a run has made of a file that isn't complete: a hidden folder, locked, with a journal.

The file itself, or a set of files, grows under ``new`` in that folder. The journal counts the steps
whose outcome is on the disk, so that the same task, begun again after it was broken off, goes on
from there.
"""

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lorabench.checkpoint import told_of
from lorabench.errors import AdapterError, FileError

_JOURNAL, _LOCK = "journal.json", "lock"


class Journal:
    """How far one task has come, and where it keeps what it made."""

    def __init__(self, out: Path, folder: Path, task: str) -> None:
        self._out, self._folder, self._task = out, folder, task
        self.new = folder / "new"
        self.steps = 0
        """Steps whose outcome is on the disk."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the disk that are taken already."""
        return sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*"))

    def resume(self, steps: int, holds: Callable[[int], bool]) -> int:
        """Return the steps that an earlier run of the same task left; clear away anything else.

        Parameters
        ----------
        steps
            Of the whole task.
        holds
            Whether what is under ``new`` is what so many steps leave.
        """
        try:
            journal = json.loads((self._folder / _JOURNAL).read_bytes())
            task, done = journal["task"], journal["steps"]
        except FileNotFoundError:
            task, done = self._task, 0
        except (
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
        ):  # what a crash of the machine left of it
            task, done = self._task, None
        cause = None
        if task != self._task:
            cause = "it had other inputs"
        elif type(done) is not int or not 0 <= done <= steps:
            cause = "its journal is damaged"
        elif not holds(done):
            cause = "its files are shorter than its journal says"
        elif done:
            self.steps = done
            return done
        for left in self._folder.iterdir():
            if left.name != _LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        if cause:
            warnings.warn(f"{self._out}: an unfinished run was cleared away: {cause}", stacklevel=3)
        return 0

    def save(self, steps: int) -> None:
        """Note that the outcome of so many steps is on the disk."""
        _save(self._folder / _JOURNAL, self._task, steps)
        self.steps = steps


def working_folder(out: Path) -> Path:
    """Return the folder in which ``out`` is made."""
    return out.with_name(f".{out.name}.partial")


@contextmanager
def journal_for(out: Path, task: str) -> Iterator[Journal]:
    """Open the journal of the run that makes ``out``, in a folder beside it, for this run alone.

    When the block ends the folder goes. When it is broken off the folder stays, if there is
    something to go on from, and a warning says so.

    Raises
    ------
    FileError
        Another run is making it, or the disk can't be written.
    """
    folder = working_folder(out)
    with told_of(out):
        _check_ours(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(lock.fileno()).st_nlink:  # its run ended, and removed it
                    raise BlockingIOError
            except BlockingIOError:
                raise FileError(f"{out}: another run is writing it; wait for its end") from None
            journal = Journal(out, folder, task)
            try:
                yield journal
            except BaseException as error:
                # An adapter that doesn't fit would fail again.
                if journal.steps and not isinstance(error, AdapterError):
                    warnings.warn(
                        f"{out}: broken off; the same command goes on from what {folder} keeps",
                        stacklevel=4,
                    )
                else:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)


def _check_ours(folder: Path) -> None:
    """Raise :class:`FileError` if something that isn't an earlier run's lies in the folder's place.

    An earlier run's leavings may be cleared away; what somebody else put there may not.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        found = "a file, link or device"
    elif any(folder.iterdir()) and not (folder / _LOCK).is_file():
        found = "a folder with other things"
    else:
        return
    raise FileError(f"{folder}: expected the folder of an earlier run, found {found}; remove it")


def _save(path: Path, task: str, steps: int) -> None:
    with (new := path.with_suffix(".new")).open("w") as stream:
        json.dump({"task": task, "steps": steps}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
