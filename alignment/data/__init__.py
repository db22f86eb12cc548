"""Rows, tokens and batches: sources -> records -> token ids -> ragged micro-batches. Knows no model, loss or optimizer.

Import from the modules themselves; a method loads only the kinds of rows that it uses.

    rows/         files and Hub ids -> records        tokenizers/   load, train and save tokenizers
    text/         texts and dialogues -> token ids    tokenize      records -> examples of limited length
    batches       examples -> micro-batches           stream        the order of examples over epochs
    prepare       all of this from a data config      doctor        faults of data files
    pretraining/  masked, next-sentence and corrupted texts
    tasks.py      labeled rows for downstream tasks
"""
