"""What not everything can do with all that adapters hold: refused before a weight is read."""

from collections.abc import Iterable, Mapping

from lorabench.adapter import Adapter
from lorabench.errors import UnavailableError


def check_kernel(kernel: str, adapters: Mapping[str, Adapter]) -> None:
    """Raise :class:`UnavailableError` if a kernel can't fuse one of the adapters' pairs.

    ``triton`` multiplies, and so wants two factors; ``scalar`` has no arithmetic for f16.
    """
    for role, adapter in adapters.items():
        for pair in adapter.pairs:
            if kernel == "triton" and pair.a is None:
                what = "a delta without factors"
            elif kernel == "scalar" and pair.weight.dtype == "F16":
                what = "an F16 weight"
            else:
                continue
            raise UnavailableError(
                f"kernel '{kernel}' can't fuse {what}: adapter '{role}' touches "
                f"'{pair.weight.name}', {pair.weight.dtype} {list(pair.weight.shape)}; choose "
                f"'gemm' or 'reference'"
            )


def check_plain(
    measurement: str, adapter: Adapter, dtypes: Iterable[str] = ("BF16", "F32")
) -> None:
    """Raise :class:`UnavailableError` unless an adapter holds nothing but two factors a weight.

    Measurements are of products over whole weights; what else there is, they would leave out.

    Parameters
    ----------
    measurement
        What is to be measured, for people.
    dtypes
        That a weight may have.
    """
    seen = set[str]()
    for pair in adapter.pairs:
        weight = pair.weight
        if pair.a is None:
            what = "with a delta without factors"
        elif len(pair.rows) != weight.shape[0] or weight.name in seen:
            what = f"in rows {pair.top} to {pair.rows.stop - 1} of {weight.shape[0]}"
        elif weight.dtype not in dtypes:
            what = f"which is {weight.dtype}"
        else:
            seen.add(weight.name)
            continue
        raise UnavailableError(
            f"{measurement} is measured on pairs of factors for whole weights in "
            f"{' or '.join(dtypes)}: {adapter.file.path} touches '{weight.name}' {what}; measure "
            f"with another adapter"
        )
