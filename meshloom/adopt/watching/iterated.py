"""What loops are over: a loader, or numbers, within progress bars, `enumerate`, `islice`, and what goes on behind its end."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from meshloom.adopt.watching.route import Loop, WayToBackward
from meshloom.adopt.watching.source import bound, method

ITERATING = ("enumerate", "tqdm", "trange", "track", "iter", "progress_bar", "cycle", "islice", "zip")


@dataclass(frozen=True)
class Iterated:
    """values: of all names on the way. loader: that trains, or None."""

    route: WayToBackward
    values: dict[str, Any]
    loader: Any

    def unwrapped(self, node: ast.expr) -> ast.expr:
        """`x` of `enumerate(tqdm(x))`."""
        wrappers = self.wrappers_of(node)
        return self._inner(wrappers[-1]) if wrappers else node

    def wrappers_of(self, node: ast.expr) -> list[ast.Call]:
        """The calls around what a loop is over, as `tqdm(...)`, also where they have a name, the outermost first."""
        found: list[ast.Call] = []
        while True:
            made = self._made_by(node.id) if isinstance(node, ast.Name) else node
            if not isinstance(made, ast.Call) or made in found or self._inner(made) is made:
                return found
            found.append(made)
            node = self._inner(made)

    def batch_in(self, loop: Loop) -> ast.expr:
        """The part of a loop's target that is a batch, beside numbers of the round."""
        assert isinstance(loop.node, ast.For)
        target = loop.node.target
        for call in self.wrappers_of(loop.node.iter):
            if method(call) == "enumerate" and isinstance(target, ast.Tuple):
                target = target.elts[1]
            elif method(call) == "zip" and isinstance(target, ast.Tuple):
                target = target.elts[call.args.index(self._inner(call))]
        return target

    def repeats(self, loop: Loop) -> ast.Call | None:
        """The call by which a loop over batches goes on behind the last one: `cycle(loader)`, or a generator of the user's."""
        assert isinstance(loop.node, ast.For)
        wrappers = self.wrappers_of(loop.node.iter)
        found = [
            each
            for each in wrappers
            if method(each) == "cycle" or (method(each) not in ITERATING and self._goes_on(each))
        ]
        return found[0] if found else None

    def _goes_on(self, call: ast.Call) -> bool:
        """Whether a generator of the user's may begin anew behind its end, as by `while True:`."""
        try:
            text = inspect.getsource(self.values[method(call)])
        except (KeyError, OSError, TypeError):
            return True
        tree = ast.parse(textwrap.dedent(text))
        return any(isinstance(each, ast.While) for each in ast.walk(tree)) or "cycle" in text

    def _inner(self, call: ast.Call) -> ast.expr:
        """What a call iterates over; the call itself if it is no iterator of something else."""
        if not call.args:
            return call
        if method(call) == "zip":
            found = [each for each in call.args if self._is_loader(each)]
            return found[0] if len(found) == 1 else call
        if method(call) in ITERATING:
            return call.args[0]
        if isinstance(call.func, ast.Name) and inspect.isgeneratorfunction(self.values.get(call.func.id)):
            names = [each for each in call.args if isinstance(each, ast.Name)]
            loaders = [each for each in names if self.values.get(each.id) is self.loader is not None]
            return loaders[0] if loaders else call
        return call

    def _is_loader(self, node: ast.expr) -> bool:
        """Whether it is a data loader, perhaps within a progress bar or `cycle`."""
        inner = self.unwrapped(node)
        return isinstance(inner, ast.Name) and isinstance(self.values.get(inner.id), DataLoader)

    def _made_by(self, name: str) -> ast.expr | None:
        """The value of the last assignment to a name before the loop that is over it."""
        values = [
            each.node.value
            for each in self.route.before
            if isinstance(each.node, ast.Assign)
            and each.source is self.route.sources[-1]
            and bound(each.node) == {name}
        ]
        return values[-1] if values else None
