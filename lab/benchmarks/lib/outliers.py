"""Models whose keys or values have outliers, like those of some model families, made of a model that has none."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lib.contenders import heads_of


@dataclass(frozen=True)
class KeyOutliers:
    """Large channels in the keys of every layer.

    Channels come in rotary pairs: one of each half of a head. Slow pairs, the last ones, hardly rotate over some
    thousand tokens, so a constant in them adds nearly the same to all scores of a query, which softmax removes. A
    factor of a pair changes nothing in full precision, because the queries are divided by it.

    Attributes:
        kind: `constant` adds `size` to the channels, as a bias of `k_proj` would; `varying` multiplies them by it.
        size: what is added, or the factor.
        speed: whether the pairs are the slowest or the fastest ones.
        pairs: how many.
        heads: KV heads that have them, all or the first one.
    """

    kind: Literal["constant", "varying"]
    size: float
    speed: Literal["slow", "fast"] = "slow"
    pairs: int = 1
    heads: Literal["all", "one"] = "all"

    @property
    def name(self) -> str:
        how = f"+{self.size:g}" if self.kind == "constant" else f"x{self.size:g}"
        return f"{how} in {self.pairs} {self.speed}, {self.heads}"

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Give a model these outliers, within a block.

        If the model normalises its keys, they come after `k_norm`, which would divide all other channels by them.

        Raises:
            ValueError: no layer has a `k_proj`.
        """
        (kv_heads, head_dim), groups = heads_of(model.config)
        change = torch.zeros(kv_heads, head_dim)
        half, first = head_dim // 2, head_dim // 2 - self.pairs if self.speed == "slow" else 0
        of_heads = slice(None) if self.heads == "all" else slice(1)
        for start in (first, half + first):
            change[of_heads, start : start + self.pairs] = 1.0
        factors = torch.where(change > 0, self.size, 1.0)
        modules = dict(model.named_modules())
        attentions = [name.removesuffix(".k_proj") for name in modules if name.endswith(".k_proj")]
        if not attentions:
            raise ValueError("expected a model with a k_proj in its layers, but found none")
        with ExitStack() as hooks:
            for name in attentions:
                keys, queries = (modules.get(f"{name}.{x}_norm") or modules[f"{name}.{x}_proj"] for x in "kq")
                if self.kind == "constant":
                    hooks.enter_context(keys.register_forward_hook(changed(torch.add, change * self.size)))
                else:
                    of_queries = (1 / factors).repeat_interleave(groups, 0)
                    for module, operand in ((keys, factors), (queries, of_queries)):
                        hooks.enter_context(module.register_forward_hook(changed(torch.mul, operand)))
            yield


@dataclass(frozen=True)
class ValueOutliers:
    """Large values in every layer.

    Attributes:
        kind: `tokens` multiplies all values of one token in sixteen, those whose id is a multiple of 16, as massive
            activations do. `varying` multiplies two channels of every value, by which the inputs of `o_proj` are
            divided, so that the model stays the same in full precision.
        size: the factor.
    """

    kind: Literal["tokens", "varying"]
    size: float

    @property
    def name(self) -> str:
        return f"values x{self.size:g} in " + ("1 token of 16" if self.kind == "tokens" else "2 channels")

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Give a model these outliers, within a block."""
        shape, groups = heads_of(model.config)
        factors = torch.ones(shape)
        factors[:, -2:] = self.size
        of_heads = factors.repeat_interleave(groups, 0).flatten()
        ids: list[Tensor] = []

        def note_ids(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            ids[:] = [options["input_ids"] if "input_ids" in options else arguments[0]]

        def enlarged(module: Any, arguments: Any, output: Tensor) -> Tensor:
            return torch.where((ids[0] % 16 == 0)[..., None], output * self.size, output)

        def divided(module: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
            return (arguments[0] / of_heads.to(arguments[0].dtype),)

        with ExitStack() as hooks:
            hooks.enter_context(model.register_forward_pre_hook(note_ids, with_kwargs=True))
            for name, module in model.named_modules():
                if name.endswith(".v_proj"):
                    change = enlarged if self.kind == "tokens" else changed(torch.mul, factors)
                    hooks.enter_context(module.register_forward_hook(change))
                if name.endswith(".o_proj") and self.kind == "varying":
                    hooks.enter_context(module.register_forward_pre_hook(divided))
            yield


def changed(operation: Callable[[Tensor, Tensor], Tensor], operand: Tensor) -> Callable[[Any, Any, Tensor], Tensor]:
    """A hook that changes the output of a projection `[..., heads * head_dim]`, or of a norm in any order.

    Args:
        operation: of the output by heads, and of the operand.
        operand: `[heads, head_dim]`.
    """

    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor:
        own = operand.to(output.dtype)
        if output.dim() < 4:
            return operation(output.unflatten(-1, own.shape), own).flatten(-2)
        return operation(output, own if output.shape[-2] == len(own) else own[:, None])

    return hook
