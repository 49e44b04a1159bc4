"""Bugs of tables with sparse gradients."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "sparse_last_chunk_only",
    "exchange/sparse_gradients.py",
    old="                arrived.append(gradient)",
    new="                arrived[:] = [gradient]",
    job="sparse_rows:plain",
    plan="dp=2,microbatches=2",
    truth=(
        "Of a table's sparse gradients only the last microbatch's counts; those of earlier "
        "microbatches are lost."
    ),
    says="those of each replica's last microbatch alone: the gradients of the other microbatches are lost",
    module="user",
)
edit(
    "sparse_counts_of_first",
    "exchange/sparse_gradients.py",
    old=(
        "            torch.cat([indices[rank, :count] for rank, count in enumerate(self._counts)]),\n"
        "            torch.cat([values[rank, :count] for rank, count in enumerate(self._counts)]),"
    ),
    new=(
        "            torch.cat([indices[rank, : self._counts[0]] for rank in range(n)]),\n"
        "            torch.cat([values[rank, : self._counts[0]] for rank in range(n)]),"
    ),
    job="sparse_rows:plain",
    plan="dp=3",
    truth=(
        "When ranks' rows of sparse gradients are added up, the first rank's number of rows is taken "
        "for all: rows of ranks with more are dropped."
    ),
    module="items",
)
edit(
    "rows_stick",
    "program/operators/used_rows.py",
    old='        """Forgets the rows of the step before."""\n        self.flags.zero_()\n',
    new='        """Forgets the rows of the step before."""\n',
    job="sparse_rows:adam",
    plan="dp=2,pp=2",
    truth=(
        "Rows of a table that earlier steps looked up count as used in every later step, so "
        "SparseAdam goes on to move rows that no sample has."
    ),
    says="they count as used in the step, and no sample uses them",
    module="user",
)
edit(
    "padding_rows_used",
    "exchange/sparse_gradients.py",
    old=(
        "            torch.cat([indices[rank, :count] for rank, count in enumerate(self._counts)]),\n"
        "            torch.cat([values[rank, :count] for rank, count in enumerate(self._counts)]),\n"
    ),
    new="            indices.reshape(-1),\n            values.reshape(-1, *self._parameter.shape[1:]),\n",
    job="sparse_rows:clicks",
    plan="dp=2",
    truth=(
        "The padding of gathered sparse rows counts as row 0: SparseAdam updates row 0 of the "
        "embedding in steps that do not use it."
    ),
    says="has the values of one device's, and other rows: rows count as used that no sample uses",
    module="people",
)
