"""The pages of running sequences: who gets, shares and gives up pages."""
