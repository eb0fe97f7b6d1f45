"""Values that are read from files again when those change on disk."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def read_file(setting: str, path: Path) -> bytes:
    """Returns the bytes of a file that a setting names.

    Raises:
      ValueError: it cannot be read; names setting, file and reason.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting} {path}: {error.strerror}") from None


class ReloadedFiles(Generic[T]):
    """What some files say; while they say nothing valid, what they said before stays in force."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Reads them for the first time.

        Args:
          paths: the files.
          load: reads and checks them; ValueError when they are not valid.

        Raises:
          ValueError: from `load`.
        """
        self._paths = tuple(paths)
        self._load = load
        self._complaint = ""
        self._stamps = self._read_stamps()
        self.value = load()

    def changed(self) -> bool:
        """Looks at the files; returns whether `value` is a new one since the last look."""
        # Read before the files are: a change in between shows at the next look.
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return False
        try:
            self.value = self._load()
        except (OSError, ValueError) as error:  # OSError: gone since it was found
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("not reloaded, the old one stays in force: %s", error)
            return False
        self._stamps, self._complaint = stamps, ""
        logger.info("reloaded: %s", ", ".join(map(str, self._paths)))
        return True

    def _read_stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(stamp_of, self._paths))


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Returns what differs when a file was replaced or written to; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
