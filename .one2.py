import sys, random
sys.path.insert(0,'.')
import bus.log; bus.log.configure(level="critical", json=True)
import tests.model.test_transfer_model as t
from tests.model._play import _shrunk
from collections import Counter
s=t.build(random.Random(int(sys.argv[1])))
def play(s): t.TransferPlay(s,Counter()).run()
s=_shrunk(s,play)
print(s)
p=t.TransferPlay(s,Counter())
try: p.run()
except Exception as e: print(repr(e)[:500])
w=p.world
g=w.group
print(g.version,g.run,g.served.value,g.served.is_committed,g.served.assigned,p.watch._run,p.watch._group_version)
for e in w.engines.values(): print(e.name,e.alive,e.truth.version,e.session.version,e.boot, e.peer.link.epoch)
from bus.journal.render import line
L=[(en.record.now_ms,line(en)) for j in w.journals for en in j.entries()]
for l in sorted(L)[-60:]: print(l[1][:230])
