"""Data: from files on disk to the batches of every client.

cases, listing, federation     one scan with its label; the cases found on disk; who takes part
readers/, datasets/            folder layouts and image files; published data sets
federation_file, sources       federation.yaml, and the cases it names
splits, partitions             train, val and test by patient; cases dealt to simulated clients
preparing/, checking/          scans to one grid, once; which cases can be used
serving/, opening              batches from memory or disk; `open_federation`, what a run starts from
proposing/, fingerprint/, phantom/, slices/    `wardround data` commands, and synthetic hospitals

Imports point from later lines to earlier ones.
"""
