"""The oracle: every op in plain NumPy, float64, written to be read and obviously right.

The bitwise rule holds here too: row-wise ops reduce along one row, products with many rows go through
`rows.product_by_rows`, and attention treats one query at a time.
"""
