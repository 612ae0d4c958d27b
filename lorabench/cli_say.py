"""What commands print: names and metadata of files may hold characters that a terminal obeys."""

import typer

_OBEYED = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def say(text: str, *, err: bool = False) -> None:
    """Print text for people, its control characters written out."""
    typer.echo(text.translate(_OBEYED), err=err)
