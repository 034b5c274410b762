"""environment.kind = "replay:text_game:Game", environment.options = {name = "GuessTheNumber-v0-raw"}: textarena games.

Needs `pip install textarena==0.7.4`. Write the game's instructions into the prompts, whose answers are the seeds. Names
that end in "-raw" answer with what is new; the others repeat the whole game in each turn.
"""

import textarena


class Game:
    def __init__(self, name):
        self.game = textarena.make(name)

    def reset(self, seed):
        self.game.reset(num_players=1, seed=seed)
        self.game.get_observation()  # the instructions

    def step(self, text):
        is_over, _ = self.game.step(action=text)
        if is_over:
            rewards, _ = self.game.close()
            return None, rewards[0], True
        _, messages = self.game.get_observation()
        return "\n".join(words for by, words, _ in messages if by == textarena.GAME_ID), None, False
