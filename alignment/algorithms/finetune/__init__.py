"""Fine-tuning for downstream tasks: classification, tagging, question answering, multiple choice."""
