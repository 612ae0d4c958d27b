"""A denoise stand-in: every weight's product at the tokens of its own stream.

Of a forward there are the products y = x @ W.T, which is where adapters come in, and nothing else:
no attention, norms, biases or activations, and no result goes into the next product. An adapter's
delta of a bias is left out with the bias. It was run on CPUs, and not run on a GPU.

A state comes to bear in one of three ways (:attr:`lorabench.plan.Strategy.apply`), side by side
below: the weights have it already (``resident``), its factors are multiplied beside weights that
have base bits (``runtime``), or each weight is copied and fused when its turn comes
(``per_layer``).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lorabench.cost import Work
from lorabench.errors import ConfigError
from lorabench.fuse import Term, terms_of
from lorabench.kernels import Kernel, Scratch, get_kernel
from lorabench.kernels.gemm import tile_rows
from lorabench.kernels.scratch import product_dtype
from lorabench.recipe import BASE, State, bound_state
from lorabench.resident import ResidentWeights
from lorabench.residual import pass_work
from lorabench.streams import ForwardWork, Product, Tokens, check_forward


def multiply(x: Tensor, weight: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Write x @ weight.T to ``out``, rounded to bf16 from f32 sums.

    By the device's fastest product: of bf16 matrices as they are, or of f32 ones where that is
    faster (see :func:`~lorabench.kernels.scratch.product_dtype`) or the weight isn't bf16. Then the
    weight is widened tile by tile, in scratch memory.

    Parameters
    ----------
    x
        ``[tokens, in]``, bf16.
    weight
        ``[out, in]``, bf16, f16 or f32.
    out
        ``[tokens, out]``, bf16.
    """
    if weight.dtype == torch.bfloat16 == product_dtype(scratch.device):
        torch.mm(x, weight.T, out=out)
        return
    wide = scratch.take("wide x", tuple(x.shape), torch.float32).copy_(x)
    step = tile_rows(weight.shape[1])
    for top in range(0, len(weight), step):
        tile = weight[top : top + step]
        if tile.dtype != torch.float32:
            tile = scratch.take("wide tile", tuple(tile.shape), torch.float32).copy_(tile)
        total = scratch.take("product", (len(x), len(tile)), torch.float32)
        torch.mm(wide, tile.T, out=total)
        out[:, top : top + len(tile)].copy_(total)


Way = Callable[[Tensor, Tensor, Sequence[Term], Tensor, Kernel, Scratch], Work]
"""Writes y to ``out`` of x, a weight, the state's terms there; gives what applying them took."""


def _resident(
    x: Tensor, weight: Tensor, terms: Sequence[Term], out: Tensor, kernel: Kernel, scratch: Scratch
) -> Work:
    multiply(x, weight, out, scratch)
    return Work()


def _runtime(
    x: Tensor, weight: Tensor, terms: Sequence[Term], out: Tensor, kernel: Kernel, scratch: Scratch
) -> Work:
    """Add s·((x @ A.T) @ B.T) of each term, every product rounded to bf16 as engines do."""
    multiply(x, weight, out, scratch)
    macs = 0
    for term in terms:
        a, b, _, top = term.pair
        h = x
        if a is not None:
            h = scratch.take("x @ A.T", (len(x), len(a)), torch.bfloat16)
            multiply(x, a, h, scratch)
            macs += len(x) * a.numel()
        delta = scratch.take("delta", (len(x), len(b)), torch.bfloat16)
        multiply(h, b, delta, scratch)
        macs += len(x) * b.numel()
        out[:, top : top + len(b)].add_(delta, alpha=term.factor)
    return Work(flops=2 * macs)


def _per_layer(
    x: Tensor, weight: Tensor, terms: Sequence[Term], out: Tensor, kernel: Kernel, scratch: Scratch
) -> Work:
    """Fuse the terms into a copy of the weight, which has the bits of the resident one."""
    work = Work()
    if terms:
        weight = scratch.take("fused", tuple(weight.shape), weight.dtype).copy_(weight)
        kernel(weight, terms, scratch)
        work = Work(snapshot_bytes=weight.nbytes) + pass_work(weight, terms)
    multiply(x, weight, out, scratch)
    return work


WAYS: dict[str, Way] = {"resident": _resident, "runtime": _runtime, "per_layer": _per_layer}


def _ignore(name: str) -> None:
    """Do nothing before a weight."""


def _ignore_product(name: str, y: Tensor) -> None:
    """Do nothing after a product."""


class Forward:
    """Forwards over resident weights, on seeded noise that stands in for the tokens.

    Parameters
    ----------
    weights
        Whose adapters, kernel and rule are used, too.
    products
        In the order to run them, as :func:`lorabench.streams.products_of` gives them.
    seed
        Of the inputs, which differ by width and number of tokens alone.

    Raises
    ------
    ConfigError
        A product's weight isn't one of the base's.
    """

    def __init__(
        self, weights: ResidentWeights, products: Sequence[Product], *, seed: int = 0
    ) -> None:
        for product in products:
            if product.name not in weights.base.entries:
                raise ConfigError(
                    f"{weights.base.path}: holds no weight '{product.name}' for a forward's "
                    f"product; take products of this base's geometry"
                )
        self._weights = weights
        self._products = tuple(products)
        self._seed = seed
        self._kernel = get_kernel(weights.kernel, weights.device, weights.rule)
        self._scratch = Scratch(weights.device)
        self._inputs: dict[tuple[int, int], Tensor] = {}

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the weights, as they are multiplied."""
        return tuple(product.name for product in self._products)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory, beside the inputs."""
        return self._scratch.nbytes

    def run(
        self,
        state: State,
        tokens: Tokens,
        apply: str = "resident",
        *,
        tensors: Mapping[str, Tensor] | None = None,
        before_weight: Callable[[str], None] = _ignore,
        after_product: Callable[[str, Tensor], None] = _ignore_product,
    ) -> ForwardWork:
        """Run one forward in a state.

        Parameters
        ----------
        tokens
            By stream; weights whose stream has none are passed over.
        apply
            A value of :attr:`lorabench.plan.Strategy.apply`.
        tensors
            By name, where a rebind is on its way to the state (:mod:`lorabench.overlap`); by
            default those of the weights, which have to be in the state, or in the base's where the
            forward applies it.
        before_weight
            Called with a weight's name before it is used.
        after_product
            Called with a weight's name and its y ``[tokens, out]``, which is gone at the next.

        Raises
        ------
        ConfigError
            The weights are in another state, the state names an adapter that isn't bound, or what
            :func:`~lorabench.streams.check_forward` refuses.
        """
        check_forward(tokens, apply)
        state = bound_state(state, self._weights.adapters)
        if tensors is None:
            self._check_state(state if apply == "resident" else BASE, apply)
            tensors = self._weights.tensors
        work = ForwardWork()
        for product in self._products:
            n = product.stream.tokens(tokens)
            if not n:
                continue
            x = self.input_of(n, product.in_)
            y = self._scratch.take("y", (n, product.out), torch.bfloat16)
            before_weight(product.name)
            weight = tensors[product.name]
            terms = self.terms(product.name, state) if apply != "resident" else ()
            applied = WAYS[apply](x, weight, terms, y, self._kernel, self._scratch)
            after_product(product.name, y)
            work += ForwardWork(1, 2 * n * weight.numel(), weight.nbytes, applied)
        return work

    def _check_state(self, wanted: State, apply: str) -> None:
        if (found := self._weights.state) != wanted:
            raise ConfigError(
                f"{self._weights.base.path}: apply '{apply}' expects the weights in state "
                f"'{wanted}', found '{found}'; rebind them first"
            )

    def terms(self, name: str, state: State) -> list[Term]:
        """Return what a state adds to a weight."""
        return terms_of(name, state, {role: self._weights.factors(role) for role in state})

    def input_of(self, tokens: int, in_: int) -> Tensor:
        """Return x ``[tokens, in]``, bf16: standard normal values, made once."""
        if (tokens, in_) not in self._inputs:
            generator = torch.Generator("cpu").manual_seed(self._seed)
            x = torch.randn(tokens, in_, generator=generator, device="cpu")
            self._inputs[tokens, in_] = x.bfloat16().to(self._weights.device)
        return self._inputs[tokens, in_]
