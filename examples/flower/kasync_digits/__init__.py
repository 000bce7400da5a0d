"""Handwritten digits, learnt K-asynchronously."""
