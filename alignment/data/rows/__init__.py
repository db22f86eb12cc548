"""Rows of files and Hub data sets, read and checked: raw rows, their formats, the records they become."""
