"""The directory that `kvlayers run` puts on PYTHONPATH. It has nothing but `sitecustomize`."""
