"""Survey: what hospitals have, before anything is trained.

answering     a hospital measures its cases, and considers what the organiser proposes
proposals     the names and the preparation that all use; a hospital's folder of those it was asked about
replies       what a hospital answered, checked and bounded before it is used
conducting    the organiser asks all hospitals that are connected
differences   how hospitals differ, and what does not fit
proposing     common classes, channels and preparation, from what hospitals said
survey_file   survey.json in the organiser's kit; the page is drawn by `page`
"""
