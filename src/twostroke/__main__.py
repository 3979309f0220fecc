"""Entry of `python -m twostroke`: the `twostroke` command."""

from __future__ import annotations

from twostroke.cli.main import main

if __name__ == "__main__":
    main()
