"""A generated data set about hotels: texts, their gold reward and simulated labelers. No model, no training."""
