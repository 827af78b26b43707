"""Image files in a folder: any folder without labels, or one sub-folder per class."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpp.data.dataset import Names, SourceFields, Split, digest, listed, shown
from mpp.words import plural

TEST_FOLDERS = ("test", "validation", "valid", "val")
BESIDE = "file beside the class folders"
PLURALS = {BESIDE: "files beside the class folders"}
MAX_BYTES = 2**30  # a larger file is no picture; reading it would take the memory of the machine


@dataclass(frozen=True, kw_only=True)
class Folder(SourceFields):
    """Every file below a folder, whatever its name ends in: content decides what is a picture. No labels."""

    kind: Literal["folder"] = "folder"
    """any folder of images, walked recursively; no labels"""

    path: Path
    """the folder, relative to the working directory"""

    def open(self, split: Split) -> "Files | None":
        """ValueError: no such folder, or no file in it."""
        if split == "test":
            return None
        root = existing_folder(self.path)
        names, ignored = walk(os.fsencode(root))
        where, rest = f"folder {shown(self.path)}", notes(ignored)
        if not names:
            raise ValueError(f"{where}: expected image files in it or in its sub-folders, found none{rest}")
        return Files(root, names, f"{where}: {plural(len(names), 'file')}{rest}")


@dataclass(frozen=True, kw_only=True)
class ClassFolders(SourceFields):
    """One folder per class, its images at any depth below.

    With train/ and one of test/, validation/, valid/, val/ inside, these are the splits.
    """

    kind: Literal["class_folders"] = "class_folders"
    """one sub-folder per class, directly or below train/ and test/"""

    path: Path
    """the folder, relative to the working directory"""

    def open(self, split: Split) -> "Files | None":
        """ValueError: no such folder, an empty class folder, or other classes in test than in train."""
        train, test = split_folders(existing_folder(self.path))
        classes, outside = class_folders(train)
        if not classes:
            raise ValueError(
                f"class_folders {shown(train)}: expected sub-folders, one per class, found none"
                f"{notes(outside)}; try kind: folder, which needs no labels"
            )
        if split == "train":
            return class_files(train, classes, outside)
        return class_files(test, classes, same_classes(train, classes, test)) if test else None


class Files:
    """Files under a root, in the order of their relative path's bytes; with or without labels."""

    def __init__(
        self,
        root: Path,
        names: Iterable[bytes],
        description: str,
        classes: tuple[str, ...] | None = None,
        labels: np.ndarray | None = None,
    ):
        self.root, self.description, self.classes = root.absolute(), description, classes
        self._names, self._labels = Names(names), labels

    def __len__(self) -> int:
        return len(self._names)

    def read(self, ids: Sequence[int]) -> list[bytes | Exception]:
        return [attempt(read_file, self._path(id)) for id in ids]

    def labels(self) -> np.ndarray | None:
        return self._labels

    def name(self, id: int) -> str:
        """The path below the root, with / between folders."""
        return shown(self._names[id])

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        sizes = (attempt(os.path.getsize, self._path(id)) for id in range(len(self)))
        words = (str(size if isinstance(size, int) else -1).encode() for size in sizes)
        return digest(part for pair in zip(self._names, words, strict=True) for part in pair)

    def _path(self, id: int) -> bytes:
        return os.path.join(os.fsencode(self.root), self._names[int(id)])


def walk(root: bytes) -> tuple[list[bytes], Counter[str]]:
    """Relative paths of all regular files below root, sorted by their bytes; and what was ignored, by reason.

    Links are followed. A folder is entered once, by its true place before any link to it: loops of links end,
    and the list does not depend on the order of the directory. Nothing is opened: a fifo would block.
    """
    files: list[bytes] = []
    ignored: Counter[str] = Counter()
    entered: set[tuple[int, int]] = set()
    folders: list[tuple[bool, bytes]] = [(False, b"")]  # a heap: true folders first, then links, each by name
    while folders:
        _, folder = heappop(folders)
        if not _enter(os.path.join(root, folder), entered, ignored):
            continue
        for kind, name in entries(os.path.join(root, folder), ignored):
            path = folder + b"/" + name if folder else name
            if kind == "file":
                files.append(path)
            else:
                heappush(folders, (kind == "linked folder", path))
    return sorted(files), ignored


def entries(folder: bytes, ignored: Counter[str]) -> Iterator[tuple[str, bytes]]:
    """(kind, name) of the files and folders directly in a folder; the rest is counted in `ignored`."""
    try:
        with os.scandir(folder) as found:
            kinds = [(_kind(entry), entry.name) for entry in found]
    except OSError:
        ignored["unreadable folder"] += 1
        return
    for kind, name in kinds:
        if kind in ("file", "folder", "linked folder"):
            yield kind, name
        else:
            ignored[kind] += 1


def _kind(entry: "os.DirEntry[bytes]") -> str:
    try:
        if entry.name.startswith(b"."):
            return "hidden folder" if entry.is_dir(follow_symlinks=False) else "hidden file"
        if entry.is_dir():
            return "linked folder" if entry.is_symlink() else "folder"
        if entry.is_file():
            return "file"
        return "special file" if os.path.exists(entry.path) else "broken link"
    except OSError:  # a link to itself, or into a folder that may not be entered
        return "broken link" if entry.is_symlink() else "unreadable file"


def _enter(folder: bytes, entered: set[tuple[int, int]], ignored: Counter[str]) -> bool:
    try:
        facts = os.stat(folder)
    except OSError:
        ignored["unreadable folder"] += 1
        return False
    if (facts.st_dev, facts.st_ino) in entered:
        ignored["repeated folder"] += 1
        return False
    entered.add((facts.st_dev, facts.st_ino))
    return True


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """Where train and test lie: root/train and root/test (or a synonym of it), else root itself and nothing.

    A class may be called `train`: alone beside other classes it is one of them.
    """
    inside = {shown(name) for kind, name in entries(os.fsencode(root), Counter()) if "folder" in kind}
    tests = [root / name for name in TEST_FOLDERS if name in inside]
    if "train" not in inside or not (tests or inside == {"train"}):
        return root, None
    # ImageNet as it is often kept has an unlabelled test/ beside val/: the first with class folders counts.
    return root / "train", next((test for test in tests if class_folders(test)[0]), tests[0] if tests else None)


def class_folders(root: Path) -> tuple[list[bytes], Counter[str]]:
    """The sorted names of the folders in root, and what else lies there."""
    outside: Counter[str] = Counter()
    found = list(entries(os.fsencode(root), outside))
    outside[BESIDE] += sum(kind == "file" for kind, _ in found)
    return sorted(name for kind, name in found if kind != "file"), outside


def same_classes(train: Path, classes: list[bytes], test: Path) -> Counter[str]:
    """What lies in test beside the class folders; ValueError if they are not those of train."""
    found, outside = class_folders(test)
    faults = [
        f"{word} {listed(map(shown, sorted(names)))}"
        for word, names in (
            ("missing", set(classes) - set(found)),
            ("not in train:", set(found) - set(classes)),
        )
        if names
    ]
    if faults:
        raise ValueError(
            f"class_folders {shown(test)}: expected the {len(classes)} class folders of {shown(train)}; "
            f"{'; '.join(faults)}"
        )
    return outside


def class_files(root: Path, classes: list[bytes], ignored: Counter[str]) -> Files:
    """The files below each class folder of root, numbered over all of them; ValueError names empty ones."""
    labelled: list[tuple[bytes, int]] = []
    empty = []
    for label, folder in enumerate(classes):
        names, more = walk(os.path.join(os.fsencode(root), folder))
        labelled += [(folder + b"/" + name, label) for name in names]
        ignored = ignored + more
        empty += [] if names else [folder]
    if empty:
        raise ValueError(
            f"class_folders {shown(root)}: expected images in every class folder, found none in "
            f"{listed(map(shown, empty))}{notes(ignored)}; remove the empty folders, or fill them"
        )
    labelled.sort()
    text = f"{plural(len(labelled), 'file')} in {plural(len(classes), 'class', 'classes')}{notes(ignored)}"
    labels = np.array([label for _, label in labelled], dtype=np.int64)
    names = (name for name, _ in labelled)
    return Files(root, names, f"class_folders {shown(root)}: {text}", tuple(map(shown, classes)), labels)


def existing_folder(path: Path) -> Path:
    """The path with ~ expanded; ValueError unless it is a folder."""
    folder = path.expanduser()
    if os.path.isdir(folder):
        return folder
    came = "found something else" if os.path.lexists(folder) else "there is none"
    there = next(parent for parent in folder.absolute().parents if os.path.isdir(parent))
    raise ValueError(f"path {shown(path)}: expected a folder, {came}; the nearest existing folder is {shown(there)}")


def read_file(path: str | bytes | os.PathLike[str]) -> bytes:
    """All bytes of a regular file of at most 1 GiB; OSError otherwise."""
    with open(path, "rb", opener=_without_waiting) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{shown(os.fspath(path))}: expected a regular file")
        if facts.st_size > MAX_BYTES:
            raise OSError(f"{shown(os.fspath(path))}: {facts.st_size:,} bytes, expected at most {MAX_BYTES:,}")
        return file.read(MAX_BYTES)


def _without_waiting(path: str, flags: int) -> int:
    """A fifo may have taken the file's place since it was listed: opening that would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def attempt(read: Callable[[Any], Any], what: Any) -> Any:
    """read(what), or the OSError it raised."""
    try:
        return read(what)
    except OSError as error:
        return error


def notes(ignored: Counter[str]) -> str:
    """' (2 hidden files, 1 broken link ignored)', or nothing."""
    parts = [plural(count, kind, PLURALS.get(kind)) for kind, count in sorted(ignored.items()) if count]
    return f" ({', '.join(parts)} ignored)" if parts else ""
