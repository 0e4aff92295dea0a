"""The command ``gpupipe``, and ``python -m gpupipe``: guarded against Ctrl-C from before the first slow import."""

from __future__ import annotations


def main() -> None:
    """Runs the command line; see :func:`gpupipe.cli.main`."""
    try:
        from gpupipe.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
