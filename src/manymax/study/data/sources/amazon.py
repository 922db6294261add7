"""Amazon reviews of 2014: 5-core reviews as JSON lines, and all ratings as CSV without a line of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from manymax.errors import ArgumentError
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.study.data.sources.delimited import is_number, read_delimited
from manymax.study.data.sources.json_lines import first_objects, read_json_lines
from manymax.study.data.sources.packed import UNREADABLE, open_bytes
from manymax.study.data.sources.table import JSON_SUFFIXES, suffix

REVIEW_FIELDS = {"user": "reviewerID", "item": "asin", "rating": "overall", "time": "unixReviewTime"}
RATINGS_COLUMNS = ["user", "item", "rating", "time"]  # the columns of the CSV, in their order
RATINGS_FILE = re.compile(r"ratings_.*\.csv(\.gz)?", re.IGNORECASE)
AMAZON_TERMS = "published by J. McAuley (UCSD) for research, without a stated licence"
AMAZON_CITATION = "McAuley et al., SIGIR 2015; He and McAuley, WWW 2016"


def find_reviews(path: Path) -> list[Path] | None:
    """A file of JSON lines, compressed or not, of which the first has the fields of a review."""
    if not path.is_file() or suffix(path) not in JSON_SUFFIXES:
        return None
    try:
        first = first_objects(path, at_most=1)[0]
    except ArgumentError:  # no JSON lines, which the reader of tables will say
        return None
    return [path] if set(REVIEW_FIELDS.values()) <= set(first) else None


def read_reviews(paths: Sequence[Path]) -> Columns:
    """Read reviewer, product, stars and time of each line; other fields of a review are ignored."""
    (path,) = paths
    return read_json_lines(path, REVIEW_FIELDS)


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
