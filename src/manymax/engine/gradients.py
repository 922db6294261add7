"""Sums the gradients of a head over its blocks, from dense tables and from lists of entries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.engine import native
from manymax.engine.blocks import Dense, Listed, Mixed, Sparse
from manymax.engine.half import WIDENED, product, widened
from manymax.engine.row_sparse import row_sparse, rows_of_table
from manymax.engine.scoring import Scoring
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup


@dataclass
class Gradients:
    """Accumulates the gradients in queries, class vectors and bias over the blocks of a head.

    input: (N, d) queries. vectors: (C, d) class vectors, in half precision too.
    matmul_vectors: (C, d), the class vectors in the dtype of the matmuls.
    wants: which gradients are wanted: of the queries, the class vectors, the bias.
    sparse_grad: whether the gradients of class vectors and bias are row-sparse tensors.
    budget: the largest number of entries to hold before they are added up.
    scoring: how scores follow from products, of which the parts are gradients.
    level: the dispatch level of the native library; None for plain torch.
    """

    input: Tensor
    vectors: Tensor
    matmul_vectors: Tensor
    wants: tuple[bool, bool, bool]
    sparse_grad: bool
    budget: int
    scoring: Scoring
    level: str | None = None
    grad_input: Tensor | None = None  # (N, d)
    grad_vectors: Tensor | None = None  # (C, d); made by the first part that needs it
    grad_rows: Tensor | None = None  # (C, d) row-sparse, what entries add if `sparse_grad` is set
    grad_bias: Tensor | None = None  # (C,)
    entries: list[Sparse] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Zeros, not empty memory: a row for which the kernel gives no part, such as one without a positive, is never
        # written.
        if self.wants[0]:
            self.grad_input = torch.zeros_like(self.input)
        if self.wants[2]:
            self.grad_bias = self.input.new_zeros(self.vectors.shape[0])
        if self.sparse_grad:
            self.budget = min(self.budget, self._few)

    @property
    def _few(self) -> int:
        """The largest number of entries that take less time and memory than a dense table of all class vectors."""
        # An entry is 20 bytes, and several times that while entries are sorted and summed.
        return max(1 << 12, self.vectors.numel() // 32)

    @property
    def num_classes(self) -> int:
        """The number of columns of a table that are classes; those beyond are padding."""
        return self.vectors.shape[0]

    def add(self, start: int, part: Dense | Sparse | Mixed | Listed, capped: Tensor | None = None) -> None:
        """Add a part of the gradient of the block that begins at row `start`; `capped` as in `Scoring.chain`."""
        if isinstance(part, Listed):
            self._add_listed(start, part)
            return
        transform = native.PLAIN
        if not self.scoring.plain:
            whole = isinstance(part, Mixed) or (isinstance(part, Dense) and part.rows is None)
            if whole and not isinstance(part, Sparse) and self._by_native(part.table):
                # Native products take the gradient of scores as it is; packed rows do not go through them.
                transform = self.scoring.transform(capped)
                if isinstance(part, Mixed) and (self.scoring.scale is not None or capped is not None):
                    self.scoring.chain_packed(part, capped)
            else:
                part = self.scoring.chain(part, capped)
        if isinstance(part, Mixed):
            self._add_mixed(start, part, transform)
        elif isinstance(part, Dense):
            self._add_dense(start, part, transform)
        else:
            self._add_sparse(start, part)

    def _add_listed(self, start: int, part: Listed) -> None:
        """Add what a Triton kernel has left, taken through a soft cap already; the host does not ask what it is."""
        from manymax.engine.triton_entries import add_listed

        rows = slice(start, start + len(part.count))
        if self.wants[1]:
            self._make_grad_vectors()
        of_queries = None if self.grad_input is None else self.grad_input[rows]
        given = self.input[rows], self.matmul_vectors, self.scoring.scale
        wanted = of_queries, self.grad_vectors if self.wants[1] else None, self.grad_bias
        add_listed(part, *given, *wanted, self._product_dtype)

    def _add_sparse(self, start: int, part: Sparse) -> None:
        """Add entries: they are collected, and summed together later."""
        if len(part.rows):
            # Entries are collected over blocks, because sorting and summing many at once costs less per entry than few
            # at a time; but never more of them than a block has scores, or they would take more memory than the block.
            if sum(len(entry.rows) for entry in (*self.entries, part)) > self.budget:
                self._add_entries()
            self.entries.append(replace(part, rows=part.rows + start))

    def _add_mixed(self, start: int, part: Mixed, transform: native.Transform) -> None:
        """Add packed rows entry by entry, and dense rows through matmuls."""
        dense = part.count < 0
        num_dense, n = int(dense.sum()), len(part.count)
        if num_dense < n:
            self._add_packed(start, part)
        if num_dense == n:
            self._add_dense(start, Dense(part.table, part.scale), transform)
        elif num_dense:
            rows = dense.nonzero().squeeze(1)
            if self._by_native(part.table):
                self._add_in_one_pass(rows + start, part.table, part.scale[rows], transform, rows)
                return
            # Within the table: a copy of the dense rows would be fresh memory, which costs more than moving them.
            native.move_dense_rows(part)
            self._add_dense(start, Dense(part.table[:num_dense], part.scale[rows], rows), transform)

    def _add_packed(self, start: int, part: Mixed) -> None:
        """Add the packed rows of a part."""
        in_order = self.input.is_contiguous() and self.vectors.is_contiguous()
        if not in_order or self._widens or (self.sparse_grad and self._lists(part)):
            # Which rows of the gradient exist is known when all entries are; and C reads memory as it lies.
            self._add_sparse(start, native.list_entries(part))
            return
        rows = slice(start, start + len(part.count))
        if self.grad_input is not None:
            native.add_to_input(part, self.vectors, self.grad_input[rows])
        if self.wants[1]:
            self._make_grad_vectors()
        if self.wants[1] or self.wants[2]:
            native.add_to_vectors(part, self.input[rows], self.grad_vectors, self.grad_bias, self.num_classes)

    def _lists(self, part: Mixed) -> bool:
        """Whether the packed rows of a part are worth listing, so that no table of all class vectors is needed."""
        return self.grad_vectors is None and int(part.count.clamp(min=0).sum()) <= self._few

    def _add_dense(self, start: int, part: Dense, transform: native.Transform) -> None:
        """Add dense rows: a matmul for each gradient, or both products in one pass of native code."""
        size = part.table.shape[0]
        rows: slice | Tensor = slice(start, start + size) if part.rows is None else part.rows + start
        if self._by_native(part.table):
            self._add_in_one_pass(rows, part.table, part.coefficient, transform)
            return
        # Under matmul="bf16" the two products below run in bfloat16 too; otherwise this is a view and no copy.
        table = part.table[:, : self.num_classes].to(self._product_dtype)
        if self.grad_input is not None:
            # Assigned, which saves reading what is 0 so far: a row is in one dense part at most, and sparse entries of
            # the same rows come after it (see BlockResult).
            self.grad_input[rows] = self._product(table) * part.coefficient.unsqueeze(1)
        if self.wants[1]:
            self._make_grad_vectors()
            assert self.grad_vectors is not None
            # The coefficient goes on x, (n, d), and not on the table, (n, C): one pass over the table less.
            scaled = self.input[rows] * part.coefficient.unsqueeze(1)
            if table.dtype == self.input.dtype:
                self.grad_vectors.addmm_(table.T, scaled)  # no (C, d) temporary for each block
            else:
                # The product is bfloat16, the sum over blocks is not: it would lose terms that are small beside it.
                self.grad_vectors += product(table.T, scaled.to(table.dtype))
        if self.grad_bias is not None:
            self.grad_bias += part.coefficient @ part.table[:, : self.num_classes]

    @property
    def _widens(self) -> bool:
        """Whether class vectors in half precision are multiplied in the precision of the queries."""
        return self.matmul_vectors is self.vectors and self.vectors.dtype != self.input.dtype

    @property
    def _product_dtype(self) -> torch.dtype:
        """The dtype of the operands of products with a dense table."""
        return self.input.dtype if self._widens else self.matmul_vectors.dtype

    def _product(self, table: Tensor) -> Tensor:
        """table (n, C) @ class vectors, (n, d)."""
        if not self._widens:
            return product(table, self.matmul_vectors).to(self.input.dtype)
        total = self.input.new_zeros(len(table), self.input.shape[1])
        for classes, vectors in widened(self.vectors, self.input.dtype):
            total.addmm_(table[:, classes], vectors)
        return total

    def _by_native(self, table: Tensor) -> bool:
        """Whether native code computes the products with a table."""
        operands = self.vectors, self.matmul_vectors, self.input
        in_order = table.stride(1) == 1 and table.dtype == self.vectors.dtype
        return in_order and native.multiplies(self.level, *operands) and native.gradient_chunks(*self.vectors.shape) > 0

    def _add_in_one_pass(
        self,
        rows: slice | Tensor,
        table: Tensor,
        coefficient: Tensor,
        transform: native.Transform,
        places: Tensor | None = None,
    ) -> None:
        """Add dense rows by native code; they are rows `places` of the table, or all of its rows."""
        assert self.level is not None
        coefficient, scaled = coefficient.to(self.input.dtype).contiguous(), None
        if self.wants[1]:
            self._make_grad_vectors()
            scaled = self.input[rows] * coefficient.unsqueeze(1)
        sums = self.grad_vectors, self.grad_bias, self.grad_input is not None
        given = table, places, self.vectors, coefficient, scaled, *sums, transform
        product = native.dense_gradients(self.level, *given)
        if self.grad_input is not None and product is not None:
            self.grad_input[rows] = product.mul_(coefficient.unsqueeze(1))

    def _make_grad_vectors(self) -> None:
        """Make the gradient of the class vectors, at the first part that needs it."""
        if self.grad_vectors is None:
            self.grad_vectors = self.input.new_zeros(self.vectors.shape)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of queries (N, d), class vectors (C, d) and bias (C,); None where one is not wanted."""
        self._add_entries()
        vectors = self.scoring.project(self._finish_vectors(), self.vectors) if self.wants[1] else None
        return self.grad_input, vectors, self._finish_bias(self.scoring.bias_gradient(self.grad_bias), vectors)

    def _finish_vectors(self) -> Tensor:
        """The gradient of the class vectors, dense or row-sparse as `sparse_grad` says."""
        if self.grad_vectors is None:
            if self.grad_rows is not None:
                return self.grad_rows
            if self.sparse_grad:  # no part at all, such as those of a batch without positives: no rows
                return row_sparse(self.input.new_empty(0, dtype=torch.long), self.input[:0], self.vectors.shape)
            self._make_grad_vectors()
        assert self.grad_vectors is not None
        if self.grad_rows is not None:  # some blocks were dense, others gave entries
            self.grad_vectors += self.grad_rows
        # A caller who asked for a sparse tensor gets one even if every row is touched: sparse optimizers take no other.
        return rows_of_table(self.grad_vectors) if self.sparse_grad else self.grad_vectors

    def _finish_bias(self, bias: Tensor | None, vectors: Tensor | None) -> Tensor | None:
        """The gradient of the bias (C,), row-sparse with the rows of the class vectors' if `sparse_grad` is set."""
        if bias is None or not self.sparse_grad:
            return bias
        # A class whose gradients cancel out is touched too; and at a query of zeros the bias alone has a gradient.
        touched = bias != 0
        if vectors is not None:
            touched[vectors.indices()[0]] = True
        ids = touched.nonzero().squeeze(1)
        return row_sparse(ids, bias[ids], bias.shape)

    def _add_entries(self) -> None:
        """Add the entries collected so far, and let go of them.

        With g_k the value of entry k, in row r_k and at class c_k: grad input[r_k] += g_k w[c_k], grad w[c_k] += g_k
        x[r_k]. Both are sums of rows of a table for each bag of entries; see `sum_bags`, which needs sorted bags.
        """
        if not self.entries:
            return
        rows, classes, values = (torch.cat([getattr(e, name) for e in self.entries]) for name in _COLUMNS)
        self.entries.clear()
        if self.grad_input is not None:
            by_row = rows, classes, values
            # The native kernels give rows in order: no sort. On a device looking would cost more than sorting.
            if not visible(rows) or bool((rows[1:] < rows[:-1]).any()):
                permutation = rows.int().argsort(stable=True)  # int32: torch sorts it by radix, several times faster
                by_row = rows[permutation], classes[permutation], values[permutation]
            self._add_to_input(*by_row)
        if self.grad_bias is not None:
            self.grad_bias.index_add_(0, classes, values)
        if not self.wants[1]:
            return
        # Stable, so that the entries of a class are summed in the order of the rows: the same bits in every run.
        permutation = classes.int().argsort(stable=True)
        rows, classes, values = rows[permutation], classes[permutation], values[permutation]
        few = self.grad_vectors is not None and 8 * len(classes) <= self.num_classes
        # On a device the host does not know how many classes are touched: the sums are a table, also of `sparse_grad`.
        if (self.sparse_grad or few) and visible(classes):
            # Only the touched classes get a row, so that memory and time follow the entries and not C.
            touched, position = classes.unique_consecutive(return_inverse=True)
            sums = sum_bags(position, rows, values, self.input, len(touched))
            if self.sparse_grad or self.grad_vectors is None:
                self._add_rows(touched, sums)
            else:
                self.grad_vectors.index_add_(0, touched, sums)
            return
        product = sum_bags(classes, rows, values, self.input, self.vectors.shape[0])
        self.grad_vectors = product if self.grad_vectors is None else self.grad_vectors.add_(product)

    def _add_rows(self, touched: Tensor, rows: Tensor) -> None:
        """Add rows (U, d) of distinct classes (U,), sorted, to a row-sparse gradient, or to a table if it is wide."""
        before = 0 if self.grad_rows is None else self.grad_rows.indices().shape[1]
        if self.grad_vectors is None and (not before or 4 * (before + len(touched)) <= self.num_classes):
            added = row_sparse(touched, rows, self.vectors.shape)
            # Coalesced after each round: otherwise a class that many rounds touch would keep a row for each of them.
            self.grad_rows = added if self.grad_rows is None else (self.grad_rows + added).coalesce()
            return
        # Coalescing holds each row several times: a table of all class vectors is smaller.
        self._make_grad_vectors()
        assert self.grad_vectors is not None
        if self.grad_rows is not None:
            self.grad_vectors.index_add_(0, self.grad_rows.indices()[0], self.grad_rows.values())
            self.grad_rows = None
        self.grad_vectors.index_add_(0, touched, rows)

    def _add_to_input(self, rows: Tensor, classes: Tensor, values: Tensor) -> None:
        """grad_input[r_k] += g_k w[c_k] over entries (K,) that are sorted by row."""
        assert self.grad_input is not None
        if not self._widens:
            self.grad_input += sum_bags(rows, classes, values, self.vectors, self.input.shape[0])
            return
        # Some entries at a time: the class vectors of all of them in float32 could be larger than the table.
        for some in torch.arange(len(rows), device=rows.device).split(WIDENED):
            vectors = lookup(self.vectors, classes[some]).to(self.input.dtype)
            place = torch.arange(len(some), device=rows.device)
            first, last = 0, len(self.input)
            if visible(rows):  # the rows that these entries are in
                first, last = int(rows[some[0]]), int(rows[some[-1]]) + 1
            self.grad_input[first:last] += sum_bags(rows[some] - first, place, values[some], vectors, last - first)


_COLUMNS = ("rows", "classes", "values")  # the fields of `Sparse`


def sum_bags(bags: Tensor, ids: Tensor, values: Tensor, table: Tensor, count: int) -> Tensor:
    """For each bag the sum of value x table[id] over its entries, (count, d); 0 for a bag without entries.

    Args:
        bags: (K,) which bag each entry belongs to, sorted.
        ids: (K,) rows of the table.
        values: (K,).
        table: (rows, d).
        count: the number of bags.
    """
    if visible(bags):
        counts = torch.bincount(bags, minlength=count)
        offsets = counts.cumsum(0) - counts  # where each bag begins
    else:  # counting makes the host wait for the largest number of a bag
        offsets = torch.searchsorted(bags, torch.arange(count, device=bags.device))
    # Measured on one thread, per entry with d = 64: embedding_bag 4 to 15 ns, a product with a CSR matrix 60 ns,
    # index_add_ 125 to 140 ns.
    return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=values.to(table.dtype))
