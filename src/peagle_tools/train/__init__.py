"""Training of P-EAGLE heads on speculators' models, losses and trainer; serving never imports this package."""
