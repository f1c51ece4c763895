"""A tree of tokens to explore interactively: the state behind `genctl explore`.

    explorer = Explorer.begin(session, prompt, prompt_ids, layers, seed=7)
    for result in explorer.do("generate 20"):  # results come while the model runs
        ...                                    # explorer.pause(), from another thread, ends it
    explorer.close()

`token_tree.TokenTree` holds plain values, `saved` is its file, `commands.COMMANDS` has a row for each command. The
model runs in one thread; `explorer.lock` is held while the tree changes. A tree needs token ids, which servers lack.
"""
