"""Passes over what FedHist remembers that read everything once; the equations stay in fedhist.py."""
