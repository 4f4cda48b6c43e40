"""Serving: prepared cases as batches.

loading       from federation.yaml to the `ClientData` of each client: `federation_of`, `RealData`
client_cache  a client's cases, checked and prepared, remembered between processes: `Preparer`
resident      cases held on the device, in memory or on disk; patches of them for training
reuse         loaded cases for the next run of the same process
augment       `Augmentation` of batches on the device
"""
