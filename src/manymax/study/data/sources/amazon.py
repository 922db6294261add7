"""Amazon reviews of 2014: 5-core reviews as JSON lines, and all ratings as CSV without a line of names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyarrow import json as arrow_json

from manymax.errors import ArgumentError
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns, complaint
from manymax.study.data.sources.delimited import (
    BYTES_PER_CHUNK,
    UNREADABLE,
    is_number,
    not_utf8,
    open_bytes,
    read_delimited,
)
from manymax.study.data.sources.table import suffix

REVIEW_FIELDS = {"user": "reviewerID", "item": "asin", "rating": "overall", "time": "unixReviewTime"}
FIELD_TYPES = {"user": pa.large_string(), "item": pa.large_string(), "rating": pa.float64(), "time": pa.int64()}
RATINGS_COLUMNS = ["user", "item", "rating", "time"]  # the columns of the CSV, in their order
RATINGS_FILE = re.compile(r"ratings_.*\.csv(\.gz)?", re.IGNORECASE)
AMAZON_TERMS = "published by J. McAuley (UCSD) for research, without a stated licence"
AMAZON_CITATION = "McAuley et al., SIGIR 2015; He and McAuley, WWW 2016"


def find_reviews(path: Path) -> list[Path] | None:
    """A file of JSON lines, compressed or not."""
    return [path] if path.is_file() and suffix(path) in (".json", ".jsonl") else None


def read_reviews(paths: Sequence[Path]) -> Columns:
    """Read reviewer, product, stars and time of each line; other fields of a review are ignored."""
    (path,) = paths
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    schema = pa.schema([(name, FIELD_TYPES[role]) for role, name in REVIEW_FIELDS.items()])
    explain = partial(_explain, path)
    try:
        with pa.input_stream(str(path)) as stream:
            table = arrow_json.read_json(
                stream,
                arrow_json.ReadOptions(block_size=BYTES_PER_CHUNK),
                arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
            )
    except (pa.ArrowException, OSError) as error:
        explain()
        raise ArgumentError(f"{path.name} cannot be read: {error}") from None
    arrays = {role: table.column(name) for role, name in REVIEW_FIELDS.items()}
    return Columns(arrays, REVIEW_FIELDS, path.name, explain)


def _explain(path: Path) -> None:
    """Raise an error for the first line that is not a review; return if all lines are."""
    try:
        with open_bytes(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    _check(f"{path.name}, line {number}", line)
    except UNREADABLE as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}. Is it complete?") from None


def _check(where: str, line: bytes) -> None:
    try:
        review = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{where}: {not_utf8(line, error)}") from None
    except ValueError as error:
        raise ArgumentError(f"{where}: expected one JSON object per line; {error}.") from None
    if not isinstance(review, dict):
        raise ArgumentError(f"{where}: expected a JSON object with {', '.join(REVIEW_FIELDS.values())}.")
    for role, name in REVIEW_FIELDS.items():
        if name not in review:
            raise ArgumentError(f"{where}: the field {name!r} is missing. The line has {', '.join(review)}.")
        value = review[name]
        fits = isinstance(value, str) and value != "" if role in ("user", "item") else _is_number(value)
        if not fits:
            raise ArgumentError(f"{where}, column {name!r}: {complaint(role, value)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and is_number(str(value))


def find_ratings(path: Path) -> list[Path] | None:
    """A file called ratings_....csv whose first line is a rating and not a line of names."""
    if not path.is_file() or not RATINGS_FILE.fullmatch(path.name):
        return None
    try:
        with open_bytes(path) as stream:
            fields = stream.readline().decode().strip().split(",")
    except (*UNREADABLE, UnicodeDecodeError):
        return None
    return [path] if len(fields) == len(RATINGS_COLUMNS) and is_number(fields[2]) and is_number(fields[3]) else None


def read_ratings(paths: Sequence[Path]) -> Columns:
    """Read lines `user,item,rating,time`."""
    (path,) = paths
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    return read_delimited(path, path.name, ",", RATINGS_COLUMNS, {role: role for role in RATINGS_COLUMNS}, quoted=False)


AMAZON_URL = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles"
PAPER_TEXT_FILTERS = Filters(min_rating=3, k_core=10)  # the filters that the text of the paper describes
ELECTRONICS = Source(
    name="electronics",
    title="Amazon Electronics 2014, 5-core reviews: 192,403 users, 63,001 products (496 MB)",
    files=(File(f"{AMAZON_URL}/reviews_Electronics_5.json.gz", "reviews_Electronics_5.json.gz"),),
    read=read_reviews,
    presets={"paper-table": Filters(), "paper-text": PAPER_TEXT_FILTERS},
    terms=AMAZON_TERMS,
    citation=AMAZON_CITATION,
    aliases=("amazon-electronics",),
)
ELECTRONICS_RATINGS = Source(
    name="electronics-ratings",
    title="Amazon Electronics 2014, all 7.8 million ratings (319 MB)",
    files=(File(f"{AMAZON_URL}/ratings_Electronics.csv", "ratings_Electronics.csv"),),
    read=read_ratings,
    presets={"paper-text": PAPER_TEXT_FILTERS},
    terms=AMAZON_TERMS,
    citation=AMAZON_CITATION,
    aliases=("amazon-electronics-ratings",),
)
