"""``python -m gpupipe.cli``, where the console script is not on the PATH."""

from gpupipe.cli import main

main()
