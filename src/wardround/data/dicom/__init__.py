"""DICOM: series and the masks drawn on them become a centre's folder, and masks of ours go back.

importing    `data import-dicom`: series and masks to image files; `volume`, `masks`, `patient_map`
web          `data fetch`, `predict --store`: an archive over DICOMweb
writing      SEG, RTSTRUCT and image series; `class_names`, `contours`
"""
