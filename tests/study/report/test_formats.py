"""`ReportTable` as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math

from manymax.study.report.formats import Cell, ReportTable, comma_separated, latex, markdown, number_text

HOSTILE = "a|b_c & 100% $x$ {y} ~^\\ <script> `*[z]\n#1"


def table(rows: tuple, **changes: object) -> ReportTable:
    columns = (("ml-1m", "lr=0.001"), ("ml-1m", "lr=0.0001"), ("gowalla", "lr=0.001"))
    return ReportTable("t", "Title", ("loss", "metric"), columns, rows, **changes)


SOFTMAX = (("softmax", "N@20"), (Cell(0.26614, 0.001, best=True, paper=0.2661), Cell(0.25), Cell(0.1, overall=True)))
RG = (("rg", "N@20"), (Cell(0.2785, span=2, best=True), Cell(None, text="-")))


def test_levels_of_headers() -> None:
    assert table(()).levels() == [
        [("ml-1m", 2), ("gowalla", 1)],
        [("lr=0.001", 1), ("lr=0.0001", 1), ("lr=0.001", 1)],
    ]


def test_equal_headers_below_different_ones_are_not_merged() -> None:
    made = ReportTable("t", "", (), (("a", "x"), ("b", "x")), ())
    assert made.levels()[1] == [("x", 1), ("x", 1)]


def test_markdown_marks_and_fills_spans() -> None:
    lines = markdown(table((SOFTMAX, RG), note="A note.")).splitlines()
    assert lines[2] == "| loss | metric | ml-1m lr=0.001 | ml-1m lr=0.0001 | gowalla lr=0.001 |"
    assert lines[4] == "| softmax | N@20 | **0.2661 ± 0.0010** (0.2661) | 0.2500 | ***0.1000*** |"
    assert lines[5] == "| rg | N@20 | **0.2785** |  | - |"
    assert lines[-1] == "A note."


def test_csv_has_full_precision_and_columns_for_spread_and_paper() -> None:
    rows = list(csv.reader(io.StringIO(comma_separated(table((SOFTMAX, RG))))))
    assert rows[0][:5] == ["loss", "metric", "ml-1m lr=0.001", "ml-1m lr=0.001 spread", "ml-1m lr=0.001 paper"]
    assert rows[1][2:5] == ["0.26614", "0.001", "0.2661"]
    assert rows[2] == ["rg", "N@20", "0.2785", "", "", "", "", "", "-", "", ""]
    assert {len(row) for row in rows} == {2 + 3 * 3}


def test_csv_without_spread_has_no_column_for_it() -> None:
    rows = list(csv.reader(io.StringIO(comma_separated(table(((("a", "b"), (Cell(1.0), Cell(2.0), Cell(3.0))),))))))
    assert len(rows[0]) == 5


def test_latex_spans_and_marks() -> None:
    lines = latex(table((SOFTMAX, RG))).splitlines()
    assert lines[1] == r"\begin{tabular}{llccc}"
    assert lines[3] == r" &  & \multicolumn{2}{c}{ml-1m} & gowalla \\"
    assert lines[6].startswith(r"softmax & N@20 & \textbf{0.2661 $\pm$ 0.0010} & 0.2500 & \textcolor{blue}{\textbf{")
    assert r"\multicolumn{2}{c}{\textbf{0.2785}} & -" in lines[7]


def test_names_cannot_break_a_table() -> None:
    made = table((((HOSTILE, "=1+1"), (Cell(1.0), Cell(2.0), Cell(text=HOSTILE))),))
    (row,) = [line for line in markdown(made).splitlines() if "script" in line]
    assert row.replace(r"\|", "").count("|") == 6
    assert r"\<script\>" in row
    rows = list(csv.reader(io.StringIO(comma_separated(made))))
    assert len(rows) == 2
    assert rows[1][1] == "'=1+1"
    body = latex(made).splitlines()[6]
    assert r"a|b\_c \& 100\% \$x\$ \{y\} \textasciitilde{}\textasciicircum{}\textbackslash{}" in body
    assert body.count(" & ") == 4


def test_nan_infinity_and_missing_numbers() -> None:
    assert number_text(math.nan) == number_text(math.inf) == "-"
    assert str(Cell(None, text="none")) == "none"
    assert str(Cell(0.5, digits=1)) == "0.5"


def test_a_table_without_rows_is_written() -> None:
    for write in (markdown, comma_separated, latex):
        assert "lr=0.001" in write(table(()))


def test_the_first_name_reaches_over_its_rows() -> None:
    rows = tuple(((name, "x"), ()) for name in ("a", "a", "b", "a"))
    assert ReportTable("t", "t", ("one", "two"), (), rows).heights() == [2, 0, 1, 1]
    assert ReportTable("t", "t", ("one",), (), ()).heights() == []
