"""Images through Hugging Face `datasets`: parquet files, saved datasets, image folders, the Hub."""

import glob
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mpp.data.dataset import SourceFields, Split, digest, listed, shown
from mpp.data.folders import attempt, read_file

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from pyarrow import Array, ChunkedArray, DataType, Table

TEST_SPLITS = ("test", "validation", "valid", "val")
LABEL_NAMES = ("label", "labels")  # a column of plain numbers or words is a label by its name only
PLAIN_LABELS = ("int", "uint", "bool", "string", "large_string")  # Arrow types of such a column


@dataclass(frozen=True, kw_only=True)
class HuggingFace(SourceFields):
    """A dataset that the `datasets` library opens; it keeps a copy of its own in its cache."""

    kind: Literal["huggingface"] = "huggingface"
    """through `datasets`: a local folder or parquet files, or a name on the Hub"""

    path: str
    """a folder (of parquet files, saved to disk, of images), `x/*.parquet`, or a name on the Hub"""

    name: str | None = None
    """which configuration, of a dataset that has several"""

    revision: str | None = None
    """branch, tag or commit on the Hub"""

    image_column: str | None = None
    """null: the one column of images"""

    label_column: str | None = None
    """null: the one column of class labels, or one called label; none is needed"""

    train_split: str = "train"
    """name of the training split"""

    test_split: str | None = None
    """name of the test split; null: the first of test, validation, valid, val that has labels"""

    def faults(self) -> Iterator[tuple[str, str]]:
        yield from super().faults()
        if self.train_split == self.test_split:
            yield "test_split", f"expected another split than train_split, got {self.test_split!r} for both"

    def open(self, split: Split) -> "Rows | None":
        """ValueError: nothing there, no such split or column, or labels in test that train does not have."""
        try:
            return self._open(split)
        except ValueError as error:
            raise ValueError(f"huggingface {shown(self.path)}: {error}") from error

    def _open(self, split: Split) -> "Rows | None":
        splits = load(self.path, self.name, self.revision)
        train = splits[_one_of("train_split", self.train_split, splits)]
        image = self.image_column or image_column(train.features)
        label = self.label_column or label_column(train.features)
        classes, labels = coded(train, label) if label is not None else (None, None)
        if split == "train":
            return Rows(train, self.path, self.train_split, image, classes, labels)
        name = self.test_split or usual_test_split(splits, self.train_split, label)
        if name is None:
            return None
        test = splits[_one_of("test_split", name, splits)]
        labels = None
        if classes is not None and label is not None and label in test.features:
            labels = coded_as(classes, test, label)
        return Rows(test, self.path, name, image, classes if labels is not None else None, labels)


class Rows:
    """One split: encoded bytes out of an Arrow table that stays on disk, and labels in memory."""

    def __init__(self, rows: "Dataset", path: str, split: str, image: str, classes: tuple[str, ...] | None, labels):
        kind = rows.data.schema.field(_one_of("image_column", image, rows.column_names)).type
        if not len(rows):
            raise ValueError(f"split {split!r} has no rows, expected at least one image")
        if not _holds_files(kind):
            raise ValueError(f"image_column {image!r} holds {kind}, expected encoded images or raw bytes")
        # Arrow format hands out the stored bytes undecoded, several times faster than Python rows do.
        self._rows = rows.select_columns([image]).with_format("arrow")
        self._path, self._split, self.classes, self._labels = path, split, classes, labels

    @property
    def description(self) -> str:
        kinds = f", {len(self.classes)} classes" if self.classes else ", no labels"
        return f"huggingface {shown(self._path)} {self._split}: {len(self):,} images{kinds}"

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, ids: Sequence[int]) -> list[bytes | Exception]:
        if not len(ids):
            return []
        encoded, paths = _columns(self._rows[[int(id) for id in ids]])
        return [_bytes(*row) for row in zip(encoded.to_pylist(), paths.to_pylist(), strict=True)]

    def labels(self) -> np.ndarray | None:
        return self._labels

    def name(self, id: int) -> str:
        """The split, the row, and the file's name where one is kept."""
        path = _columns(self._rows[[int(id)]])[1][0].as_py()
        return f"{self._split}[{id}]" + (f" ({self._relative(path)})" if path else "")

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return digest(self._facts())

    def _facts(self) -> Iterator[bytes]:
        import pyarrow.compute as pc

        yield b"" if self._labels is None else self._labels.tobytes()
        for table in self._rows.iter(batch_size=10_000):
            encoded, paths = _columns(table)
            sizes = pc.call_function("binary_length", [encoded])
            for size, path in zip(sizes.to_pylist(), paths.to_pylist(), strict=True):
                size = attempt(os.path.getsize, path) if size is None and path else size
                yield str(size if isinstance(size, int) else -1).encode()
                yield self._relative(path or "").encode()

    def _relative(self, path: str) -> str:
        """Without the place of the data: below the dataset's folder, else the bare name."""
        root = os.path.abspath(os.path.expanduser(self._path))
        inside = os.path.isabs(path) and path.startswith(root + os.sep)
        return shown(os.path.relpath(path, root) if inside else os.path.basename(path))


@lru_cache(maxsize=4)
def load(path: str, name: str | None, revision: str | None) -> "dict[str, Dataset]":
    """All splits of a dataset, kept for the next call; ValueError says in one line why there are none."""
    try:
        from datasets import config
    except ImportError:
        raise ValueError("the `datasets` library is not installed; try: pip install datasets") from None
    open_it = _door(path, name, revision)
    try:
        found = open_it()
    except Exception as error:
        raise ValueError(f"`datasets` cannot open it: {_short(error)}{_hint(path, config)}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _door(path: str, name: str | None, revision: str | None) -> Callable[[], Any]:
    """The call that opens what lies at the path, or on the Hub under that name."""
    from datasets import load_dataset, load_from_disk

    folder = Path(path).expanduser()
    if path.endswith(".parquet"):
        files = sorted(glob.glob(str(folder), recursive=True))
        if not files:
            raise ValueError("expected parquet files, there are none by that name")
        _unused("a parquet file", name=name, revision=revision)
        return partial(load_dataset, "parquet", data_files=files)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        _unused("a dataset saved to disk", name=name, revision=revision)
        return partial(load_from_disk, str(folder))
    if folder.is_dir():
        _unused("a local folder", revision=revision)
        return partial(load_dataset, str(folder.absolute()), name)
    if folder.exists() or _looks_local(path):
        raise ValueError("expected a local folder or *.parquet files, there is none (a name on the Hub is owner/name)")
    return partial(load_dataset, path, name, revision=revision)


def _looks_local(path: str) -> bool:
    """Not a possible name on the Hub, or below a folder that is here."""
    return not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path) or ("/" in path and Path(path).parent.is_dir())


def _unused(what: str, **fields: str | None) -> None:
    for field, value in fields.items():
        if value is not None:
            raise ValueError(f"{field} is {value!r}, but this is {what}, which has none; leave {field} out")


def _one_of(field: str, name: str, there: Collection[str]) -> str:
    if name not in there:
        raise ValueError(f"{field} is {name!r}, expected one of {listed(there)}; set {field}")
    return name


def image_column(features: "Features") -> str:
    """The one column of type Image; failing that, of stored files or bytes."""
    from datasets import Image

    found = [name for name, feature in features.items() if isinstance(feature, Image)]
    found = found or [field.name for field in features.arrow_schema if _holds_files(field.type)]
    if len(found) != 1:
        raise ValueError(
            f"expected one column of images, found {listed(found) or 'none'} among the columns "
            f"{listed(features)}; set image_column"
        )
    return found[0]


def label_column(features: "Features") -> str | None:
    """The one column of type ClassLabel; failing that, one called label or labels; None: unlabelled."""
    from datasets import ClassLabel

    found = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    found = found or [name for name in LABEL_NAMES if name in features]
    if len(found) > 1:
        raise ValueError(f"several columns could be the label: {listed(found)}; set label_column")
    return found[0] if found else None


def usual_test_split(splits: "dict[str, Dataset]", train: str, label: str | None) -> str | None:
    """The first split with a usual name and with labels; without labels if none has them."""
    found = [name for name in TEST_SPLITS if name in splits and name != train]
    # Benchmarks keep the labels of their test split hidden, as -1: such a split measures nothing.
    labelled = (name for name in found if label is None or _has_labels(splits[name], label))
    return next(labelled, found[0] if found else None)


def _has_labels(rows: "Dataset", column: str) -> bool:
    return column in rows.features and bool((coded(rows, column)[1] >= 0).any())


def coded(rows: "Dataset", column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names, and per row an int64 number into them, -1 where the row has no label.

    The names are those of the ClassLabel, else the sorted values found.
    """
    _one_of("label_column", column, rows.column_names)
    table: Any = rows.select_columns([column]).with_format("arrow")[:]
    values = table.column(0)
    names = getattr(rows.features[column], "names", None)
    if names is None:
        if not str(values.type).startswith(PLAIN_LABELS):
            raise ValueError(f"label_column {column!r} holds {values.type}, expected integers or words")
        names, values = _sorted_values(values)
    codes = values.fill_null(-1).to_numpy().astype(np.int64)
    if len(codes) and not -1 <= codes.min() <= codes.max() < len(names):
        raise ValueError(f"label_column {column!r} holds {codes.min()}..{codes.max()} for {len(names)} names")
    return tuple(names), codes


def _sorted_values(values: "ChunkedArray") -> "tuple[list[str], Array]":
    """The distinct values as names, sorted as what they are (9 before 10); each row's number among them."""
    import pyarrow as pa

    found = sorted(values.unique().drop_null().to_pylist())
    number = {value: code for code, value in enumerate(found)}
    return list(map(str, found)), pa.array([number.get(value) for value in values.to_pylist()], pa.int64())


def coded_as(classes: tuple[str, ...], rows: "Dataset", column: str) -> np.ndarray:
    """Labels of another split as numbers into train's classes; ValueError names those train lacks."""
    names, codes = coded(rows, column)
    unknown = sorted({names[code] for code in np.unique(codes) if code >= 0} - set(classes))
    if unknown:
        raise ValueError(f"{len(unknown)} classes of the test split are not in train: {listed(unknown)}")
    number = {name: code for code, name in enumerate(classes)}
    return np.array([*(number.get(name, -1) for name in names), -1], dtype=np.int64)[codes]


def _holds_files(kind: "DataType") -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _columns(table: "Table") -> "tuple[Array, Array]":
    """(bytes, path) of the rows; either may be null."""
    import pyarrow as pa

    column = table.column(0).combine_chunks()
    if not pa.types.is_struct(column.type):
        return column, pa.nulls(len(column), pa.string())
    fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    return fields["bytes"], fields.get("path", pa.nulls(len(column), pa.string()))


def _bytes(encoded: bytes | None, path: str | None) -> bytes | Exception:
    if encoded is not None:
        return encoded
    return attempt(read_file, path) if path else ValueError("the row holds no image")


def _hint(path: str, config: Any) -> str:
    if Path(path).expanduser().is_dir():
        return "; for a plain folder of image files try kind: folder or class_folders"
    return "; HF_HUB_OFFLINE is set: only what is in the cache can be opened" if config.HF_HUB_OFFLINE else ""


def _short(error: BaseException) -> str:
    """The first line of an error and of what caused it."""
    chain = [error, error.__cause__] if error.__cause__ else [error]
    return "; ".join(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}" for e in chain)
