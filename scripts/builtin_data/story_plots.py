"""The sentences of the stories.

In a template `[a|b]` is one of several wordings and `{slot}` is filled in by stories.py:
`{h}` is the hero and `{f}` the friend, whose pronouns always differ, so that "he" and "she" are
clear: `{he} {him} {his} {himself}` belong to the hero, `{fhe} {fhim} {fhis}` to the friend. The
first `{f}` of a story introduces the friend ("her friend Tom"), the later ones are the bare name,
as `{fname}` always is. `{obj}` is a thing with its adjective and `{thing}` without. `{When}` opens
the first sentence of a plot.
"""

from __future__ import annotations

# Openings that tell of the past in general; the plot goes on with "One day, ...".
BACKGROUND_OPENINGS = (
    "Once upon a time, there was a {adj} {kind} [named|called] {h}. {He} lived {home}.",
    "Once upon a time, there was a {adj} {kind} [named|called] {h} who lived {home}.",
    "Once upon a time, a {adj} {kind} [named|called] {h} lived {home}.",
    "Once upon a time, {hero} lived {home}.",
    "Once upon a time, {home}, there lived a {adj} {kind} [named|called] {h}.",
    "Once there was a {adj} {kind} [named|called] {h} who lived {home}.",
    "There was a {adj} {kind} who lived {home}. {His} name was {h}.",
    "There was once a {kind} [named|called] {h} who lived {home}.",
    "{home}, there lived a {adj} {kind} [named|called] {h}.",
    "{home} lived a {adj} {kind}. {His} name was {h}.",
    "{h} was a {adj} {kind} who lived {home}.",
    "{h} was a {adj} {kind}. {He} lived {home}.",
    "The {adj} {kind} was called {h}. {He} lived {home}.",
    "The {adj} {kind} lived {home}. {His} name was {h}.",
    "A {adj} {kind} [named|called] {h} lived {home}.",
    "A {kind} [named|called] {h} lived {home}.",
    "Long ago, a {adj} {kind} [named|called] {h} lived {home}.",
    "Long, long ago, there was a {adj} {kind} whose name was {h}. {He} lived {home}.",
    "This is the story of {h}, a {adj} {kind} who lived {home}.",
    "Everyone knew {hero}. {He} lived {home} and {love}.",
    "Not so long ago, {hero} lived {home}.",
)

# Openings that already tell of one day; the plot goes on with "That day, ...".
SCENE_OPENINGS = (
    "One {weather} morning, {hero} woke up early.",
    "One {weather} morning, a {adj} {kind} [named|called] {h} woke up with a smile.",
    "One morning, {hero} opened {his} eyes and [stretched|yawned]. [The sun was already up.|The birds were singing.]",
    "One day, {hero} woke up and looked outside. It was a {weather} day.",
    "One day, a {adj} {kind} [named|called] {h} felt like [having an adventure|going outside|doing something new].",
    "It was a {weather} morning, and {hero} was [wide awake|full of energy|in a good mood].",
    "It was a {weather} day. {hero} [was sitting at home|was looking out of the window].",
    "On the first day of [spring|summer|autumn|winter], {hero} woke up very early.",
)

TRAITS = (
    "{He} {love}.",
    "{He} {love} more than anything else.",
    "Everyone liked {him} because {he} was [kind|funny|honest|friendly|helpful].",
    "{He} was small, but {his} heart was big.",
    "Every day, {he} learned something new.",
)

LOVES = (
    "loved to sing",
    "loved to play outside",
    "loved to watch the clouds",
    "loved to tell stories",
    "loved to read",
    "loved to look at the stars",
    "loved to pick flowers",
    "loved to splash in puddles",
    "loved to ask questions",
    "loved to collect stones",
)

LOST = (
    (
        "{When} {h} could not find {his} {obj}.",
        "{When} {h} lost {his} {obj}. It was {his} favorite thing in the whole world.",
        "{h} had a {obj} that {he} took everywhere. {When} it was gone.",
        "{When} {h} was playing {spot} when {he} noticed that {his} {obj} was missing.",
    ),
    (
        "{He} looked {spot2}, but it was not there.",
        "{He} looked {spot2}, but all {he} found was [an old shoe|a pile of leaves|a sleepy beetle|a broken cup].",
        (
            "First {he} looked [under the bed|behind the door|in every corner]. Then {he} looked {spot2}. The "
            "{thing} was nowhere to be seen."
        ),
        "{He} searched all day, but {he} could not find it. A tear rolled down {his} cheek.",
    ),
    (
        '"[What is wrong|Why are you so sad|What happened]?" asked {f}. "I have lost my {thing}," said {h}.',
        'On the way home, {he} met {f}. "Have you seen my {thing}?" asked {h}. "No," said {f}, "but I can help you."',
        '{f} heard {him} crying. "I cannot find my {thing}," {h} told {fhim}.',
    ),
    (
        (
            '"[Do not worry|Do not be sad|Cheer up]," said {f}. "[We will look for it together|Four eyes see more '
            'than two|We will not stop until we find it]."'
        ),
        (
            '"Let us think," said {f}. "Where did you see it last?" {h} thought hard. "I had it yesterday, {spot3}!" '
            "{he} said."
        ),
    ),
    (
        "Together they went back. There, {spot3}, lay the {thing}!",
        "They looked and looked. At last, {f} saw something {spot3}. It was the {thing}!",
        "So they went out together, and soon {f} gave a shout. The {thing} was {spot3}!",
        (
            "They followed the path, step by step. And there it was, {spot3}, [a little dirty|a little wet] but not "
            "broken."
        ),
    ),
    (
        '"Thank you!" cried {h}, and {he} gave {f} a big hug.',
        "{h} was so happy that {he} danced around {f}. From that day on, {he} took good care of {his} {thing}.",
        '{h} held the {thing} close. "You are a true friend," {he} said to {f}.',
        "{h} smiled from ear to ear. A good friend, {he} thought, was worth more than any {thing}.",
    ),
)

QUARREL = (
    (
        "{When} {h} and {f} were playing {spot}. They both wanted the {obj}.",
        "{When} {h} met {f} {spot}. They played together until they found a {obj}.",
        "{When} {h} went to play with {f}. In the grass lay a {obj}, and both of them saw it at the same time.",
    ),
    (
        '"It is mine!" shouted {h}. "No, it is mine!" shouted {f}.',
        '"I saw it first," said {h}. "That is not true," said {f}. "I did!"',
        '"Give it to me," said {h}. "No," said {f}, and {fhe} pulled as hard as {fhe} could.',
    ),
    (
        "They [shouted|argued|quarreled] until they were both angry. Then {f} went home without a word.",
        "{h} stamped {his} foot and walked away. {f} walked away too, in the other direction.",
        "In the end, nobody wanted to play anymore. {f} went home, and {h} stayed behind with the {thing}.",
    ),
    (
        "That evening, {h} sat alone. [The house was very quiet|Everything was very quiet], and {he} missed {f}.",
        "{h} tried to play alone, but it was no fun at all. {He} felt sorry for what {he} had said.",
        "All night long, {h} could not sleep. {He} thought about {f} and felt [bad|sad|lonely].",
    ),
    (
        (
            'The next morning, {he} went to see {f}. "I am sorry," {he} said. "You are more important to me than a '
            '{thing}."'
        ),
        'So {he} knocked on the door of {f}. "I am sorry that I shouted," said {h}. "I am sorry too," said {f}.',
        'The next day, {he} ran to {f} and took a deep breath. "I was wrong," {he} said. "Please be my friend again."',
    ),
    (
        "{f} smiled. From then on, they shared the {thing}, and they never [quarreled|fought] about it again.",
        "{f} laughed and hugged {him}. They took turns with the {thing} all day.",
        "Then they both laughed, and the quarrel was over. Sharing was much more fun than fighting.",
    ),
)

BUILD = (
    (
        "{When} {h} had a great idea. {He} wanted to build a {project}.",
        '{When} {h} told {f} about {his} plan. "I want to build a {project}," {he} said.',
        "{When} {h} decided to build a {project}.",
        "For a long time, {h} had dreamed of a {project}. {When} {he} began to build it.",
    ),
    (
        "{He} collected [wood|branches|old boards] and [nails|rope|strong string]. Then {he} went to work.",
        "{He} drew a plan on a [big leaf|piece of paper]. Then {he} looked for wood and nails.",
        "{He} worked all morning. {He} measured, sawed, and hammered.",
    ),
    (
        "But it was harder than {he} thought. [With a loud crash|With a crack|Bit by bit], everything fell down.",
        "But the wood was too heavy for {him}, and nothing stayed in its place.",
        "Soon {he} was tired, and the {project} still looked [crooked|very strange].",
    ),
    (
        '"I will never finish it," {h} sighed. "[Not alone|Not on your own]," said {f}, "but I can help you."',
        '{f} came to look. "You need a friend who can hold the boards," {fhe} said with a smile.',
        '"May I help?" asked {f}. "Oh yes, please," said {h}.',
    ),
    (
        "{f} held the boards, and {h} hammered in the nails. [Slowly|Little by little], the {project} grew.",
        "Together they carried the wood and tied it with rope. They sang while they worked.",
        "They tried again, this time with more care. {f} had good ideas, and {h} had quick hands.",
    ),
    (
        "When the sun went down, the {project} was finished. It was [strong|perfect|the best in the land].",
        "After three days, it was done. All the neighbors came to see the {project}.",
        'At last, the {project} was ready. "We did it!" said {h}, and {f} clapped {fhis} hands.',
    ),
)

STORM = (
    (
        "One evening, dark clouds came over the [hills|trees|fields]. {h} was [visiting|at home with] {f}.",
        "One afternoon, {h} was out for a walk with {f} when the sky turned black.",
        "One night, a big storm came. {h} was [visiting|at home with] {f}, and both of them were wide awake.",
    ),
    (
        "The wind howled, and rain began to fall. Then there was a flash of lightning.",
        "Thunder rolled over the land, and the rain poured down.",
        "The wind shook the trees, and big drops of rain fell to the ground.",
    ),
    (
        (
            '"I am afraid," whispered {f}. {h} took {fhis} hand. "[Stay close to me|I am with you|It is only '
            'noise]," {he} said.'
        ),
        (
            '"What if the roof flies away?" asked {f}. "Then we will build a new one," said {h}, but {his} voice was '
            "shaking."
        ),
        'Somebody knocked. It was an old [owl|crow|traveler], cold and wet. "Come in quickly," said {h}.',
    ),
    (
        "They lit a candle and told each other funny stories.",
        "They sat down [under a warm blanket|by the fire] and sang every song they knew.",
        "{h} made hot [tea|milk|soup], and they counted the seconds between lightning and thunder.",
    ),
    (
        "Little by little, the storm moved away. Soon only a few drops fell.",
        "In the end, the thunder grew quiet, and the clouds drifted away.",
        "After a long time, the rain stopped, and the first star came out.",
    ),
    (
        "In the morning, there was a rainbow in the sky. {h} and {f} had never seen such bright colors.",
        '"It was not so bad with you," said {f}. {h} smiled, because {he} felt the same.',
        "When the sun rose, they went outside and cleaned up the broken branches together.",
    ),
)

STRANGER = (
    (
        "{When} {h} was walking home when {he} saw a stranger {spot}.",
        "{When} a stranger came to the place where {h} lived.",
        "{When} {h} heard a quiet voice {spot}.",
    ),
    (
        "It was a {fadj} {fkind} with a heavy bag. {Fhis} name was {fname}, and {fhe} looked [tired|hungry|cold].",
        "It was a {fadj} {fkind} named {fname}. {Fhe} had hurt {fhis} foot and could not walk.",
        "It was a {fadj} {fkind} named {fname}. {Fhe} had lost {fhis} way and did not know where to go.",
    ),
    (
        '"Can you help me?" asked {f}. "Of course," said {h}.',
        'Some of the neighbors looked away, but {h} did not. "You can stay with me," {he} said.',
        '"I have come a long way," said {f}. "Then you must rest," said {h}, and {he} opened the door.',
    ),
    (
        "{He} gave {fhim} some {food} and a warm place to sleep.",
        "{He} made a soft bed for {fhim} and brought {fhim} some {food}.",
        "{h} shared {his} supper with {fhim}. They talked until late at night.",
    ),
    (
        'The next day, {f} felt much better. "I will never forget what you did," {fhe} said.',
        "After a few days, {f} was strong again and said goodbye.",
        'In the morning, {f} smiled for the first time. "You are very kind," {fhe} said.',
    ),
    (
        "Before {fhe} left, {fhe} gave {h} a {obj}. {h} kept it for the rest of {his} life.",
        "A year later, a letter came from {f}. Inside was an invitation to visit {fhim}.",
        "{f} decided to stay, and {h} had a new neighbor and a new friend.",
        "So a stranger became a friend, just because {h} had stopped to help.",
    ),
)

RACE = (
    (
        "{When} there was a big race {spot}. {h} wanted to win it, and so did {f}.",
        '{When} {f} said, "I am faster than you." "We will see," said {h}. "Let us race!"',
        "{When} everyone came together for the great race. {h} stood at the start, right next to {f}.",
    ),
    (
        'An old [owl|goose|crow] gave the signal. "Ready, steady, go!"',
        'Their neighbors lined the path and cheered. "One, two, three, go!"',
        "{h} took a deep breath. Then a bell rang, and they both began to run.",
    ),
    (
        "{f} was faster at first. {Fhe} laughed and looked back at {h}.",
        "{h} ran as fast as the wind, and soon {he} was far ahead.",
        "They ran side by side, over the bridge and up the hill.",
    ),
    (
        "Suddenly, {f} tripped over a [root|stone] and fell. {h} could have won easily.",
        "Near the end of the path, {f} slipped in the mud and hurt {fhis} leg. There were only a few steps left.",
    ),
    (
        'But {he} stopped and turned around. "Are you all right?" {he} asked.',
        "But {h} did not think about the race anymore. {He} ran back to {f} and helped {fhim} up.",
        '{h} turned back at once. "Take my hand," {he} said. "We will finish this race together."',
    ),
    (
        "Arm in arm, they crossed the line, and everyone cheered for both of them.",
        "They came in last, but they came in together. Everyone clapped louder than ever before.",
        (
            'Somebody else won the race that day. "You won something better," said an old [owl|goose|crow]. "You won '
            'a friend."'
        ),
    ),
)

SECRET = (
    (
        '{When} {f} whispered to {h}, "I have a secret. Can you keep it?"',
        '{When} {f} came running to {h}. "You must come with me," {fhe} said. "But do not tell anyone!"',
        "{When} {h} saw that {f} was hiding something {spot}.",
    ),
    (
        '"[What is it|What could it be]?" asked {h}. {His} heart was beating fast.',
        '"I promise not to tell anyone," said {h}.',
        "{h} was so curious that {he} could hardly stand still.",
    ),
    (
        "{f} led {him} along a narrow path until they came to a hidden garden.",
        "{f} showed {him} an old box. Inside lay a map and a {obj}.",
        "Behind some leaves was a nest with three small eggs in it.",
    ),
    (
        (
            '"It is wonderful," said {h}. "How did you find it?" "[By chance|I followed a butterfly|I was chasing a '
            'leaf]," said {f}.'
        ),
        '"Nobody must know about this," said {f}. {h} nodded.',
        "They sat there for a long time and did not say a word.",
    ),
    (
        "It was hard to be silent, but {h} kept {his} promise.",
        "When the others asked {h} where {he} had been, {he} only smiled.",
        "Every afternoon, they came back to look after their secret.",
    ),
    (
        '"I knew I could trust you," said {f}. From then on, they told each other everything.',
        "A secret shared with a friend, thought {h}, was the best kind of secret.",
        "And so it stayed their secret, and it made them both very happy.",
    ),
)

MEAL = (
    (
        "{When} {h} wanted to make some {food}, but there was almost nothing in the kitchen.",
        "{When} {h} was very hungry. {He} wanted to cook some {food}.",
        "{When} {h} invited {his} friends to supper. {He} wanted to make some {food}.",
    ),
    (
        "{He} had a big pot and a spoon, but not much more.",
        "{He} looked in every cupboard, but {he} found only [salt|flour|one egg|one onion].",
        "{He} had to go to the market, but {his} purse was empty.",
    ),
    (
        'Just then, {f} came by. "I have a few [apples|carrots|nuts|berries]," {fhe} said. "You can have them."',
        '"I am hungry too," said {f}. "Let us cook together!"',
        '{h} told {f} about it. "I can bring [butter|cheese|honey|milk]," said {f}.',
    ),
    (
        "One after another, the neighbors came, and each of them brought something.",
        "{h} stirred the pot, and {f} set the table.",
        "They washed, chopped, and stirred. Soon a wonderful smell filled the air.",
    ),
    (
        '"It needs a little more salt," said {f}. {h} tasted it and nodded.',
        "At last, the {food} stood on the table, warm and ready.",
        "{h} counted the plates. There was enough for everybody.",
    ),
    (
        "They ate until they were full, and they laughed a lot. Food tasted best when it was shared.",
        '"This is the best meal I have ever had," said {f}. {h} thought so too.',
        "Nobody went home hungry that night, and {h} was the happiest of all.",
    ),
)

JOURNEY = (
    (
        "{When} {h} packed {his} bag. {He} wanted to see {goal}.",
        "All {his} life, {h} had wanted to see {goal}. {When} {he} set off.",
        '{When} {h} looked at an old map and said, "I want to see {goal}!"',
    ),
    (
        "{f} went with {him}, because nobody should travel alone.",
        '"I will come with you," said {f}. So they left together at sunrise.',
        "{He} packed some {food} and asked {f} to come along.",
    ),
    (
        (
            "They walked through [dark woods|wide fields|green valleys] and crossed [a deep river|an old bridge|a "
            "high pass]."
        ),
        "On the second day, they lost their way. A [shepherd|crow|snail] showed them the right path.",
        "The road was long, and it rained a lot. At night, they slept under the stars.",
    ),
    (
        '"My feet hurt," said {f}. "Just a little farther," said {h}.',
        '"Should we go back?" asked {f}. {h} shook {his} head. "We have come so far," {he} said.',
        "When {h} grew tired, {f} told {him} a funny story.",
    ),
    (
        "At last, they came to the top of a hill. There it was, {goal}, more beautiful than any dream.",
        "Then, one morning, they saw {goal}. They stood still and held their breath.",
        "After seven days, they reached {goal}. {h} cried with joy.",
    ),
    (
        'They stayed for a while, and then they went home. "Next time, we will go even farther," said {h}.',
        "When they were home again, they had a hundred stories to tell.",
        "But the best part of the journey, {h} said later, was the friend by {his} side.",
    ),
)

SKILL = (
    (
        "{When} {h} saw {f} {spot}. {f} could {skill}, and {h} wanted to learn it too.",
        "{h} wished that {he} could {skill}. {When} {he} asked {f} for help.",
        "Everyone {h} knew could {skill}, but {h} could not. {When} {he} made up {his} mind to learn it.",
    ),
    (
        '"Is it difficult?" asked {h}. "Only at the beginning," said {f}.',
        '"I will teach you," said {f}. "But you must be patient."',
        '"Watch me," said {f}, "and then try it yourself."',
    ),
    (
        "The first time, everything went wrong. {h} fell flat on {his} nose.",
        "{h} tried once, twice, three times. It did not work at all.",
        "It looked so easy, but it was not. {h} wanted to give up.",
    ),
    (
        '"[Nobody learns it in one day|Everyone makes mistakes]," said {f}. "Try again."',
        '"I cannot do it," said {h}. "You cannot do it yet," said {f}, and {fhe} smiled.',
        '{f} did not laugh at {him}. "I fell many times too," {fhe} said.',
    ),
    (
        "So {h} practiced every day, in the sun and in the rain.",
        "{h} practiced in the morning and in the evening. Each day, it went a little better.",
    ),
    (
        'Then, one day, it worked! "Look at me!" cried {h}. "I can {skill}!"',
        "After a few weeks, {h} could {skill} almost as well as {f}. {He} was very proud.",
        (
            "At last, {he} could do it. And when a small [mouse|snail|bird] wanted to learn it too, {h} was a "
            "patient teacher."
        ),
    ),
)

GIFT = (
    (
        "{When} {h} remembered that it was the birthday of {f}. {He} did not have a gift.",
        "It was almost the birthday of {f}. {When} {h} began to look for a gift.",
        "{When} {h} wanted to make {f} happy. {He} decided to find a special gift.",
    ),
    (
        "{He} counted {his} coins, but there were only three of them.",
        "In the shop, there was a {obj2}, but it cost too much.",
        "{He} looked {spot}, but {he} found nothing that was good enough.",
    ),
    (
        "Then {he} had an idea. {He} would make a {obj} {himself}!",
        "So {he} sat down and made a {obj} with {his} own hands.",
        "At home, {he} took the {obj} that {he} loved most. {He} cleaned it and put it in a box.",
    ),
    (
        "It took {him} a long time, and in the end {he} was very tired.",
        "{He} tied a yellow ribbon around it. It looked lovely.",
        "{He} worried a little. What if {f} did not like it?",
    ),
    (
        'The next day, {f} opened the gift. {Fhis} eyes grew wide. "A {obj}!" {fhe} cried.',
        '{f} opened the box very slowly. "Is this {thing} really for me?" {fhe} asked.',
        "When {f} saw the {thing}, {fhe} could not speak. Then {fhe} hugged {h} tightly.",
    ),
    (
        '"It is the best gift of all," said {f}, "because it comes from you."',
        "{h} felt warm inside. Giving was even nicer than getting.",
        "From that day on, {f} kept the {thing} next to {fhis} bed.",
    ),
)

FEAR = (
    (
        "There was only one problem. {h} was afraid of {fear}.",
        "But {h} had a secret. {He} was afraid of {fear}.",
        "{h} was brave about many things, but {he} was afraid of {fear}.",
    ),
    (
        "{When} {f} asked {him} to come along on an adventure. {h} wanted to say no.",
        '{When} {he} told {f} about it. "Everyone is afraid of something," said {f}.',
        "{When} {f} saw that {he} was trembling.",
    ),
    (
        '"What are you afraid of?" asked {f}. "I am afraid of {fear}," said {h} very quietly.',
        '"I used to be afraid too," said {f}. "Come, I will show you something."',
        '"Give me your hand," said {f}. "We will be brave together."',
    ),
    (
        "{h} closed {his} eyes and counted to ten. Then {he} took one small step.",
        "{His} knees were shaking, but {he} did not run away.",
        "{h} breathed in and breathed out. Slowly, {his} heart grew calm.",
    ),
    (
        "Nothing bad happened. {He} took another step, and then another.",
        "And then {he} noticed that it was not so terrible at all.",
        "{f} stayed right beside {him}, and that made everything easier.",
    ),
    (
        '"I did it!" cried {h}. "I knew you could," said {f}.',
        "Since that day, {h} has known that being brave means being afraid and trying anyway.",
        "After that, {h} was hardly ever afraid of {fear} again.",
    ),
)

GARDEN = (
    (
        "{When} {h} found a strange seed {spot}. It was round and [golden|blue|green].",
        "{When} an old [owl|snail|toad] gave {h} a tiny seed.",
        "{When} {h} traded {his} {obj} for a single seed.",
    ),
    (
        '"It is just a seed," said {f}. "Wait and see," said {h}.',
        '"What will it become?" asked {f}. "I do not know," said {h}. "That is the fun of it."',
        "{He} showed it to {f}, and together they dug a hole in the ground.",
    ),
    (
        "{h} planted it in the garden and watered it every morning.",
        "{He} put it into the soft earth and sang a little song for it.",
    ),
    (
        "Days passed, but nothing happened. {f} shook {fhis} head.",
        "A week went by. There was nothing to see but brown earth.",
        "First came the rain, and then came the sun. Still there was nothing to see.",
    ),
    (
        "But {h} did not give up. One morning, a small green leaf looked out of the ground.",
        "But {h} was patient. Then, one day, something green appeared.",
    ),
    (
        (
            "By the end of summer, it was [a tall sunflower|a tree full of apples|a bush full of berries]. {h} and "
            "{f} shared everything it gave them."
        ),
        '"You were right to wait," said {f}. Above them, [a huge flower|a hundred tiny flowers] opened in the sun.',
        "It grew and grew until it was taller than the house. Good things, thought {h}, take time.",
    ),
)

RESCUE = (
    (
        "{When} {h} heard somebody shouting. The voice came from somewhere {spot}.",
        '{When} {h} heard a cry. "Help! Help!" It came from somewhere {spot}.',
    ),
    (
        "It was {f}. {Fhe} had fallen into a deep hole and could not get out.",
        "It was {f}. {Fhe} had slipped into a ditch and could not climb out.",
        "It was {f}. {Fhe} was stuck in the mud and could not move.",
    ),
    (
        '"[Hold on|Do not be afraid|Stay calm]!" called {h}. "I will help you."',
        '"Please hurry!" cried {f}. {h} looked around and thought quickly.',
        "{h} tried to reach {fhim}, but {his} arms were too short.",
    ),
    (
        "{He} found a long rope and threw one end of it to {f}.",
        "{He} tied some vines together and threw them to {f}.",
        "{He} took a long branch and held it out to {f}.",
    ),
    (
        "{h} pulled with all {his} strength. [Slowly|Bit by bit|Inch by inch], {f} came closer.",
        '"Now!" said {h}. {f} held on tightly and did not let go.',
    ),
    (
        'At last, {f} was safe. "You saved me," {fhe} said, and they walked home together.',
        "A moment later, {f} was free. {Fhe} laughed and cried at the same time.",
        (
            "Soon they were sitting side by side in the grass. {f} promised to be more careful, and {h} promised "
            "that {he} would always be there for {fhim}."
        ),
    ),
)

TRUTH = (
    (
        "{When} {h} was playing in the house of {f}. By accident, {he} broke a {obj}.",
        "{When} {h} borrowed a {obj} from {f}. On the way home, {he} dropped it, and it broke.",
        "{f} had a {obj}. {When} {h} played with it in secret, and it broke.",
    ),
    (
        "{h} was shocked. Quickly, {he} hid the pieces {spot}.",
        "{He} did not know what to do. {He} hid the broken {thing} and ran home.",
        '"Nobody saw me," thought {h}, but {his} stomach hurt.',
    ),
    (
        'The next day, {f} asked, "Have you seen my {thing}?" {h} looked at the floor and said no.',
        '"Where is my {thing}?" asked {f}. "Maybe the wind took it," said {h}. {His} ears turned red.',
    ),
    (
        "That night, {h} could not sleep. The lie felt like a stone in {his} heart.",
        "{h} did not want to eat or play. {He} could think only of the {thing}.",
    ),
    (
        'In the morning, {he} went to {f} and told {fhim} everything. "It was me," {he} said. "I am so sorry."',
        'At last, {he} could not stand it anymore. "I broke your {thing}," {he} said in a small voice.',
    ),
    (
        '"Thank you for telling me the truth," said {f}. "We can fix it together."',
        "{f} was sad about the {thing}, but {fhe} was not angry. {h} felt as light as a feather.",
        "{f} thought for a while. Then {fhe} smiled, and they fixed the {thing} with a little glue.",
    ),
)

PARTY = (
    (
        "{When} {h} noticed that everybody was acting strangely. Even {f} did not want to play.",
        "{When} {h} went to see {f}, but nobody was at home.",
        '{When} {h} asked {f} to play. "I have no time today," said {f}, and {fhe} hurried away.',
    ),
    (
        "{h} walked around, but all the houses were empty.",
        "{He} saw two neighbors whispering {spot}. When they saw {him}, they stopped.",
        '"Has everyone forgotten me?" thought {h}.',
    ),
    (
        "{He} sat down {spot2} and felt very lonely.",
        "Sadly, {he} went home. The path had never seemed so long.",
    ),
    (
        "Suddenly, {he} heard soft music. {He} followed the sound.",
        "Then {he} saw a light in a window far away. {He} went to look.",
        "When {he} came home and opened the door, it was dark inside. Somebody giggled.",
    ),
    (
        '"Surprise!" shouted {f} and all the others. There were [lanterns|balloons|ribbons] everywhere.',
        '"Happy birthday!" cried {f}. Behind {fhim} stood all the neighbors with some {food}.',
    ),
    (
        "{h} laughed until {he} had tears in {his} eyes. Nobody had forgotten {him} after all.",
        "They danced and sang until the moon came up. {h} would never forget that day.",
        '"We wanted to surprise you," said {f}, and {fhe} gave {him} a {obj}.',
    ),
)

MUSIC = (
    (
        "{When} {h} heard a beautiful song. It came from somewhere {spot}.",
        "{When} {h} was listening to the wind when {he} heard music.",
    ),
    (
        "{He} followed the sound and found {f}, who was playing [the flute|the fiddle|the drum] all alone.",
        "{He} went closer. There sat {f}, playing an old [flute|fiddle|drum].",
    ),
    (
        '"That was lovely," said {h}. {f} blushed. "I thought nobody was listening," {fhe} said.',
        '"Why do you play alone?" asked {h}. "Because I am shy," said {f}.',
    ),
    (
        (
            '"There is a festival tonight," said {h}. "You should play for everyone!" {f} shook {fhis} head. "I will '
            'stand right next to you," {h} promised. At last, {f} agreed.'
        ),
        (
            '"Play it again," said {h}, "and I will dance to it." So {f} began once more. {h} danced to the music, '
            "and {f} grew braver with every note."
        ),
        (
            '"Music is for sharing," said {h}. "Come with me!" So they went to the market together, and there {f} '
            "played {fhis} song again."
        ),
    ),
    (
        "In the evening, the whole village listened to {f}. When the song was over, the cheering did not stop.",
        "Soon everyone came to listen. {f} smiled at {h}, and {fhe} was not shy anymore.",
        "Ever since then, they have made music together every evening.",
    ),
)

PLOTS = (
    LOST,
    QUARREL,
    BUILD,
    STORM,
    STRANGER,
    RACE,
    SECRET,
    MEAL,
    JOURNEY,
    SKILL,
    GIFT,
    FEAR,
    GARDEN,
    RESCUE,
    TRUTH,
    PARTY,
    MUSIC,
)

ENDINGS = (
    "That night, {h} fell asleep with a smile on {his} face.",
    "It was a day that {h} and {f} never forgot.",
    "And from that day on, {h} and {f} were the best of friends.",
    "And if you listen closely, you can still hear them laughing.",
    "{h} went to bed tired but happy.",
    "And they all lived happily ever after.",
    "{h} looked up at the stars and felt very lucky.",
    "The end.",
)
