"""``python -m gpupipe``: the same as the command ``gpupipe``."""

from gpupipe.cli import main

main()
