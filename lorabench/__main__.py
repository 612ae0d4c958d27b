"""``python -m lorabench``, the same as the command ``lorabench``."""

from lorabench.cli import main

if __name__ == "__main__":
    main()
