"""What many models compute at once on a GPU, as Triton kernels. Only a machine with Triton can import its modules."""
