"""A module of a user's that cannot be imported."""

1 / 0  # noqa: B018
