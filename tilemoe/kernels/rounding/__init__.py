"""Token rounding: each expert's number of rows is rounded to a multiple of the GEMMs' tile."""
