"""What ``inspect`` says of a file, and every command of what it leaves out of an adapter."""

from collections.abc import Iterable, Mapping
from typing import Any

from lorabench.adapter import Adapter
from lorabench.layout import Fact, bytes_fact, facts, few, flops_fact, histogram, share


def inspect_text(fields: Mapping[str, Any]) -> str:
    """Say what `describe_base` or `describe_adapter` found, and `describe_match` under ``base``."""
    rows: list[Fact] = [
        ("files", len(fields["files"]), ""),
        bytes_fact("bytes", fields["bytes"]),
        ("tensors", fields["tensors"], histogram(fields["dtypes"])),
        ("parameters", fields["params"], ""),
    ]
    if fields["kind"] == "base":
        kind = "a base"
        rows.append(("blocks", fields["blocks"], ""))
    else:
        kind = "an adapter"
        kinds = [("kind", name, f"x {count:,}") for name, count in fields["kinds"].items()]
        rows += [
            *(("names", style, "") for style in fields["names"]),
            ("modules", fields["modules"], ""),
            *kinds,
            *([("rank", histogram(fields["ranks"]), "")] if fields["ranks"] else []),
            *(
                ("scale", f"{scale['scale']:g}", f"x {scale['modules']:,} ({scale['source']})")
                for scale in fields["scales"]
            ),
            bytes_fact("factor bytes", fields["factor_bytes"]),
            flops_fact(fields["pass_flops"]),
        ]
        if others := fields["text_encoders"]:
            rows.append(("text encoders'", len(others), f"{few(others)}: out of scope"))
    text = f"{fields['path']}: {kind}\n{facts(rows)}"
    if refused := fields.get("not_applied"):
        text += f"\n\nnot applied\n{_refused_lines(refused)}"
    if metadata := fields["metadata"]:
        shown = [(_cut(name, 30), _cut(text, 60), "") for name, text in metadata.items()]
        text += f"\n\nmetadata\n{facts(shown)}"
    if match := fields.get("base"):
        touched = match["touched_params"]
        rows = [
            ("matched targets", len(match["matched"]), few(match["matched"])),
            ("unmatched targets", len(match["unmatched"]), few(match["unmatched"])),
            ("touched parameters", touched, share(touched, match["params"])),
            flops_fact(match["pass_flops"]),
            bytes_fact("pass bytes", match["pass_bytes"]),
        ]
        text += f"\n\nheld against {match['name']}\n{facts(rows)}"
    return text


def left_out_text(adapter: Adapter) -> str:
    """Say what of an adapter isn't applied though it was allowed, and what is assumed of it."""
    path = adapter.file.path
    lines = [
        f"{path}: {len(names):,} {what}: {few(names)}"
        for what, names in (
            ("modules that the base lacks are left out", adapter.unmatched),
            ("modules of text encoders are out of scope", adapter.text_encoders),
        )
        if names
    ]
    lines += [
        f"{path}: the scale of {modules:,} modules is {scale.value:g}, {scale.source}"
        for scale, modules in adapter.scales.items()
        if scale.is_assumed
    ]
    if adapter.skipped:
        told = [{"tensor": k.name, "kind": k.kind, "remedy": k.remedy} for k in adapter.skipped]
        lines.append(f"{path}: not applied:\n{_refused_lines(told)}")
    return "\n".join(lines)


def _refused_lines(refused: Iterable[Mapping[str, str]]) -> str:
    """Say for each kind that isn't applied which tensors are of it, and what to do."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for key in refused:
        kinds.setdefault((key["kind"], key["remedy"]), []).append(key["tensor"])
    return "\n".join(
        f"  {kind} x {len(names):,}: {few(names)}" + (f"\n    {remedy}" if remedy else "")
        for (kind, remedy), names in kinds.items()
    )


def _cut(text: str, width: int) -> str:
    """Put a text into a line, its end left out where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
