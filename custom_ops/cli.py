"""Subcommands of `pagegraft` that belong to custom_ops."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to the command line."""
