"""The verdicts on the claims, by the rules in `rules.md`, from the raw results. Nothing here imports headwise."""
