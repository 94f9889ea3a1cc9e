"""rvllm on a Ray cluster (`pip install 'rvllm[ray]'`): the server as a Ray Serve application, batches by Ray Data."""
