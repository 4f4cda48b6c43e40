"""Data: from files on disk to the batches of every client. Each line uses those above it.

listing, cases, readers/          cases found on disk; scans in memory; one module a layout or file format
phantom/                          synthetic hospitals
federation_file, federation       federation.yaml; the clients of a run, and what they agree on
datasets/, sources                published data sets; the cases a federation.yaml names
splits, partitions                train, val and test by patient; cases dealt to simulated clients
preparing/, checking/             every case on one grid, once; which cases can be used
proposing/, serving/, opening     `data init`; batches from memory or disk; `open_federation` for a run
fingerprint/, slices/             what a hospital may share; volumes as 2D images
"""
