"""A tree of tokens that a person goes through: the state under `genctl explore`.

    explorer = Explorer.begin(session, prompt, prompt_ids, layers, seed=7)
    for result in explorer.do("generate 20"):  # results come while the model runs
        ...                                    # explorer.pause(), from another thread, ends it
    explorer.close()

`token_tree.TokenTree` is plain values, `saved` its file, `commands.COMMANDS` has a row for each command. The model
runs in one thread; `explorer.lock` is held while the tree changes. A tree needs token ids, so servers have none.
"""
