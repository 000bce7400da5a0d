"""The paper's experiments as data, their runner, and the published numbers."""
