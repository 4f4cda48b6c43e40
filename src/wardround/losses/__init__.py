"""What clients minimise: `objective` (Objective, its Context, the supervised objectives) and the contrastive
objectives. `segmentation`, `evidential` and `contrastive` are pure functions of tensors.
A method's own objective stands in its file under methods/; OBJECTIVES in methods/ lists all of them.
"""
